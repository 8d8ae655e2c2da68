"""Opens a node's stores from its configuration.

Every store that is read over a network is metered, limited, retried and bounded. Where participants have buckets of
their own, one routed store leads each path to its writer's.
"""

import random
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from grailnode import UserError
from grailnode.beacon.relays import RELAYS, Relay
from grailnode.config import Config
from grailnode.node.telemetry import DownloadReport, NodeTelemetry
from grailnode.run.buckets import parse_bucket
from grailnode.store.checks import PermanentError
from grailnode.store.decorators.caching import CachedStore, DiskCache
from grailnode.store.decorators.limiting import BoundedStore, LimitedStore, MeteredStore
from grailnode.store.decorators.mirrored import MirroredStore
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from grailnode.store.decorators.routed import KnownStores, RoutedStore, SpaceDirectory
from grailnode.store.disk import disk_errors
from grailnode.store.https.https_store import HttpsStore, open_client
from grailnode.store.local import LocalStore
from grailnode.store.place import PlaceSection
from grailnode.store.s3.s3_session import read_credentials
from grailnode.store.s3.s3_store import S3Store
from protocol import limits
from protocol.identity.authority import Revisions
from protocol.run import RunManifest
from roles.ports import Clock, ObjectStore

STRANGER: Final = PlaceSection(
    kind="https", url="https://announced.invalid", concurrency=4, attempts=2, deadline_seconds=120.0
)
"""The limits for spaces of keys that the authority does not name: a host that hangs delays a node only a little."""

_LIMIT_NAMES: Final = {
    *("concurrency", "requests_per_second", "attempts", "connect_seconds"),
    *("silence_seconds", "deadline_seconds", "min_bytes_per_second"),
}
_LOOPBACK_HOSTS: Final = {"127.0.0.1", "localhost"}


class Storage:
    """Opens the stores of one node. A node that does not write, and has no credentials, reads its bucket by URL.
    Objects are cached on this machine, but for those who audit storage: they must read what is there now.
    """

    def __init__(self, config: Config, telemetry: NodeTelemetry, *, writes: bool = True, caches: bool = True) -> None:
        self._config = config
        self._telemetry = telemetry
        self._meter = telemetry.metrics
        self._rng = random.Random()  # noqa: S311 - jitter, nothing secret
        self._writes = writes
        self._caches = caches
        self._clients: dict[bool, httpx.AsyncClient] = {}

    def routed(
        self, run: RunManifest, revisions: Revisions, key: bytes, state: ObjectStore, clock: Clock
    ) -> ObjectStore:
        """Open the store of a node: the shared one, or one that routes each path to its writer's store."""
        section = self._config.store
        own = self.own()
        if section.meeting is None:
            return own if section.kind == "local" else self._mirrored(self._cached(own), run, revisions, key, clock)
        stores = KnownStores(
            key=key,
            own=own,
            meeting=self._place("store.meeting", section.meeting, self._writes),
            beacon=run.beacon.chain_hash.hex(),
            peers={
                bytes.fromhex(peer): self._place(f"store.peers.{peer}", place, writes=False)
                for peer, place in section.peers.items()
            },
        )

        def authority_keys() -> set[bytes]:
            authority = revisions.current
            return {*authority.trainers, *authority.validators, *authority.workers}

        def open_space(url: str, owner: bytes) -> ObjectStore:
            return self.space(url, is_stranger=owner not in authority_keys())

        directory = SpaceDirectory(stores.meeting, state, clock, revisions.run_id, authority_keys)

        routed = self._cached(RoutedStore(stores, directory, clock, open_space))
        return self._mirrored(routed, run, revisions, key, clock)

    def own(self) -> ObjectStore:
        """Open the place that this node writes to, without routes."""
        return self._place("store", self._config.store, self._writes)

    def _mirrored(
        self, store: ObjectStore, run: RunManifest, revisions: Revisions, key: bytes, clock: Clock
    ) -> ObjectStore:
        """Add the authority's mirrors to a store; who audits storage reads its origin."""
        if not self._caches:
            return store

        def open_mirror(url: str) -> ObjectStore:
            return self._cached(self.space(url))

        ttl, telemetry = run.head_ttl, self._telemetry
        return MirroredStore(store, revisions, key, ttl, clock, open_mirror, telemetry, self._rng)

    def copy_target(self, text: str, region: str) -> ObjectStore:
        """Open a mirror's directory, or its bucket in the notation of `init`; UserError for any other text."""
        if "://" not in text:
            return self._place("--to", PlaceSection(kind="local", path=Path(text).absolute()), writes=True)
        place = PlaceSection.model_validate(parse_bucket(text, region).section)
        return self._place("--to", place, writes=True)

    def _cached(self, store: ObjectStore) -> ObjectStore:
        if not self._caches:
            return store
        node = self._config.node
        folder = self._config.at(node.cache)
        with disk_errors(str(folder)):
            cache = DiskCache(folder, node.cache_bytes)
        return CachedStore(store, cache, DownloadReport(self._telemetry))

    def relays(self, chain: bytes) -> list[Relay]:
        """Open the relays of a chain by its hash: those of run.toml, or else `RELAYS`; none when the run's
        own store serves its rounds. UserError if an entry of run.toml is not the URL of a relay.
        """
        relays = []
        for url in self._config.beacon.relays or RELAYS.get(chain, ()):
            try:
                is_loopback = urlsplit(url).hostname in _LOOPBACK_HOSTS
                store = HttpsStore(url, self._client(public_only=False), plain_http=is_loopback)
            except ValueError as error:
                raise UserError(f"beacon.relays: {error}") from None
            relays.append(Relay(url, MeteredStore(store, self._meter)))
        return relays

    def space(self, url: str, *, is_stranger: bool = True) -> ObjectStore:
        """Open a space that is read by the URL which its node announces."""
        section = self._config.store
        section_limits = (STRANGER if is_stranger else section).model_dump(include=_LIMIT_NAMES)
        place = PlaceSection.model_validate({**section_limits, "kind": "https", "url": url})
        may_be_private = section.private_addresses or self._is_named_here(url)
        if url.startswith("http://") and not may_be_private:
            raise PermanentError(f"{url}: plain http to this machine; store.private_addresses = true allows it")
        return self._decorated(self._https(place, public_only=not may_be_private), place)

    def _is_named_here(self, url: str) -> bool:
        """Return whether an announced URL is on a server of this machine that the operator's configuration names."""
        section, own = self._config.store, urlsplit(url)[:2]
        places = (section, section.meeting or section, *section.peers.values())
        return own[0] == "http" and own in [urlsplit(place.url)[:2] for place in places]

    def _place(self, name: str, section: PlaceSection, writes: bool) -> ObjectStore:
        if section.kind == "local":
            store: ObjectStore = LocalStore(self._config.at(section.path))
            return BoundedStore(MeteredStore(store, self._meter))  # a retry does not mend a disk
        store = self._https(section, public_only=False) if section.kind == "https" else self._s3(name, section, writes)
        return self._decorated(store, section)

    def _s3(self, name: str, section: PlaceSection, writes: bool) -> ObjectStore:
        file = section.credentials
        credentials = read_credentials(self._config.at(file) if file is not None else None)
        if credentials is None and not writes and section.url:
            return self._https(section, public_only=False)
        if credentials is None:
            raise UserError(
                f"{name}: no credentials for bucket {section.bucket}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                f"or name a file of mode 0600 in {name}.credentials"
            )
        return S3Store(section, credentials)

    def _https(self, section: PlaceSection, *, public_only: bool) -> HttpsStore:
        return HttpsStore(
            section.url,
            self._client(public_only=public_only),
            deadline=section.deadline_seconds,
            min_rate=section.min_bytes_per_second,
            plain_http=section.url.startswith("http://"),
        )

    def _client(self, *, public_only: bool) -> httpx.AsyncClient:
        """Return the HTTP client that all HTTPS stores of the process share; it is never closed."""
        if public_only not in self._clients:
            self._clients[public_only] = open_client(public_only=public_only)
        return self._clients[public_only]

    def _decorated(self, store: ObjectStore, section: PlaceSection) -> ObjectStore:
        limited = LimitedStore(
            MeteredStore(store, self._meter),
            concurrency=section.concurrency,
            rate=section.requests_per_second,
            burst=max(1, round(section.requests_per_second)),
            max_bytes=limits.MAX_SHARD_BYTES,
        )
        policy = RetryPolicy(attempts=section.attempts, deadline=section.deadline_seconds)
        return BoundedStore(RetryingStore(limited, self._rng, policy))
