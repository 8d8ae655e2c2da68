"""A node's store from its configuration: adapters inside limits, counts and retries, and one route for each
participant.
"""

import random
from collections.abc import Collection, Iterator
from typing import Final
from urllib.parse import urlsplit

import httpx

from grailnode.beacon.public_chains import RELAYS
from grailnode.beacon.relays import Relay
from grailnode.config import Config, ConfigError, PlaceSection
from grailnode.node.download_progress import DownloadReport
from grailnode.store.credentials import read_credentials
from grailnode.store.decorators.bounded import BoundedStore
from grailnode.store.decorators.caching import CachedStore
from grailnode.store.decorators.disk_cache import DiskCache
from grailnode.store.decorators.limiting import LimitedStore, RequestLimits
from grailnode.store.decorators.metering import MeteredStore, StoreMeter
from grailnode.store.decorators.prefixed import PrefixedStore
from grailnode.store.decorators.readonly import ReadOnlyStore
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from grailnode.store.decorators.routed import KnownStores, RoutedStore
from grailnode.store.decorators.space_directory import Directory
from grailnode.store.disk import disk_errors
from grailnode.store.https.https_store import HttpsStore, TransferPatience, open_client
from grailnode.store.local import LocalStore
from grailnode.store.permanent_error import PermanentError
from grailnode.store.s3.s3_session import S3Location
from grailnode.store.s3.s3_store import S3Store
from protocol import limits, paths
from protocol.identity.authority import Revisions
from protocol.run import RunManifest
from roles.ports import Clock, ObjectStore, StoreError, Telemetry

STRANGER: Final = PlaceSection(
    kind="https", url="https://announced.invalid", concurrency=4, attempts=2, deadline_seconds=120.0
)
"""How patient a node is with spaces of keys that the authority does not name: a host that hangs holds up little."""

_CONNECTIONS: Final = 64
_THIS_MACHINE: Final = {"127.0.0.1", "localhost"}


_ORPHAN_SECONDS: Final = (
    86_400.0  # a younger upload may be this writer's own of before a crash, and is resumed by its next put
)


async def sweep_orphans(config: Config, key: bytes, telemetry: Telemetry, now: float) -> None:
    """Abort the multipart uploads below a key's own paths that nobody has completed for a day: their parts are stored
    and billed.

    For the writer of these paths, when it starts. A service that refuses is told of, and nothing else: it costs money,
    not truth.

    Args:
        now: seconds since the Unix epoch.
    """
    section = config.store
    if section.kind != "s3":
        return  # a directory sweeps its temporary files when it is opened
    file = section.credentials
    store = S3Store(_location(section), read_credentials(config.at(file) if file is not None else None))
    own = paths.owned(key)
    prefix = f"{section.prefix.rstrip('/')}/{own}" if section.prefix else own
    try:
        aborted = await store.abort_uploads(prefix, now - _ORPHAN_SECONDS)
    except StoreError as error:
        telemetry.event("orphans-left", error=str(error))
    else:
        telemetry.event("orphans-swept", uploads=aborted)
    finally:
        store.close()


class _Named(Collection[bytes]):
    """The keys that the authority names as trainers and validators, at each look."""

    def __init__(self, revisions: Revisions) -> None:
        self._revisions = revisions

    def __contains__(self, key: object) -> bool:
        authority = self._revisions.current
        return key in authority.trainers or key in authority.validators

    def __iter__(self) -> Iterator[bytes]:
        authority = self._revisions.current
        return iter(dict.fromkeys((*authority.trainers, *authority.validators)))

    def __len__(self) -> int:
        return len(list(iter(self)))


class Storage:
    """Opens the stores of one node.

    Args:
        config: of the node; telemetry: counts what the stores are asked for.
        writes: whether the node writes; a bystander reads its own bucket by URL where it has no credentials.
    """

    def __init__(self, config: Config, telemetry: Telemetry, *, writes: bool = True) -> None:
        self._config = config
        self._telemetry = telemetry
        self._meter = _TelemetryMeter(telemetry)
        self._rng = random.Random()  # noqa: S311 - jitter, nothing secret
        self._writes = writes
        self._clients: dict[bool, httpx.AsyncClient] = {}

    def shared(self) -> ObjectStore:
        """The store that all nodes of a run share.

        Raises:
            ConfigError, CredentialsError, StoreError: it cannot be opened.
        """
        return self._place("store", self._config.store, self._writes)

    def routed(
        self, run: RunManifest, revisions: Revisions, key: bytes, state: ObjectStore, clock: Clock
    ) -> ObjectStore:
        """The store of a node: the shared one, or one that leads to every participant's own.

        Args:
            revisions: who may act now; key: the node's public key; state: its own durable storage.

        Raises:
            ConfigError, CredentialsError, StoreError: it cannot be opened.
        """
        section = self._config.store
        if section.meeting is None:
            return self.shared() if section.kind == "local" else self._cached(self.shared())
        places = KnownStores(
            key=key,
            own=self.shared(),
            meeting=self._place("store.meeting", section.meeting, self._writes),
            beacon=run.beacon.chain_hash.hex(),
            peers={
                bytes.fromhex(peer): ReadOnlyStore(self._place(f"store.peers.{peer}", place, writes=False))
                for peer, place in section.peers.items()
            },
        )
        named = _Named(revisions)
        directory = Directory(places.meeting, state, clock, revisions.run_id, named)

        def open_space(url: str, owner: bytes) -> ObjectStore:
            return self._space(url, patient=owner in named)

        return self._cached(RoutedStore(places, directory, clock, open_space))

    def _cached(self, store: ObjectStore) -> ObjectStore:
        node = self._config.node
        folder = self._config.at(node.cache)
        with disk_errors(str(folder)):
            cache = DiskCache(folder, node.cache_bytes)
        return CachedStore(store, cache, DownloadReport(self._telemetry))

    def relays(self, chain: bytes) -> list[Relay]:
        """The relays of a public beacon chain; none where the run's own store serves its rounds.

        Args:
            chain: its hash; where run.toml names no relays, those that are known for it.

        Raises:
            ConfigError: not URLs of relays.
        """
        found = []
        for url in self._config.beacon.relays or RELAYS.get(chain, ()):
            try:
                store = HttpsStore(url, self._client(False), plain_http=_is_this_machine(url))
            except ValueError as error:
                raise ConfigError(f"beacon.relays: {error}") from None
            found.append(Relay(url, MeteredStore(store, self._meter)))
        return found

    def _space(self, url: str, *, patient: bool) -> ObjectStore:
        section = self._config.store
        pattern = section if patient else STRANGER
        place = PlaceSection.model_validate(
            {**_patience(pattern), "kind": "https", "url": url, "attempts": pattern.attempts}
        )
        if url.startswith("http://") and not section.private_addresses:
            raise PermanentError(f"{url}: plain http to this machine; store.private_addresses = true allows it")
        return self._decorated(self._https(place, public_only=not section.private_addresses), place)

    def _place(self, name: str, section: PlaceSection, writes: bool) -> ObjectStore:
        if section.kind == "local":
            store: ObjectStore = LocalStore(self._config.at(section.path))
            return BoundedStore(MeteredStore(store, self._meter))  # asking a disk again does not mend it
        store = self._https(section, public_only=False) if section.kind == "https" else self._s3(name, section, writes)
        decorated = self._decorated(store, section)
        return PrefixedStore(decorated, section.prefix.rstrip("/") + "/") if section.prefix else decorated

    def _s3(self, name: str, section: PlaceSection, writes: bool) -> ObjectStore:
        file = section.credentials
        credentials = read_credentials(self._config.at(file) if file is not None else None)
        if credentials is None and not writes and section.url:
            return self._https(section, public_only=False)
        if credentials is None:
            raise ConfigError(
                f"{name}: no credentials for bucket {section.bucket}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                f"or name a file of mode 0600 in {name}.credentials"
            )
        return S3Store(_location(section), credentials)

    def _https(self, section: PlaceSection, *, public_only: bool) -> HttpsStore:
        pace = TransferPatience(deadline=section.deadline_seconds, min_rate=section.min_bytes_per_second)
        plain = section.url.startswith("http://")
        return HttpsStore(section.url, self._client(public_only), pace=pace, plain_http=plain)

    def _client(self, public_only: bool) -> httpx.AsyncClient:
        """Connections are shared by everything that is read over HTTPS, and end with the process."""
        if public_only not in self._clients:
            self._clients[public_only] = open_client(connections=_CONNECTIONS, public_only=public_only)
        return self._clients[public_only]

    def _decorated(self, store: ObjectStore, section: PlaceSection) -> ObjectStore:
        bounds = RequestLimits(
            concurrency=section.concurrency,
            rate=section.requests_per_second,
            burst=max(1, round(section.requests_per_second)),
            max_put_bytes=limits.MAX_SHARD_BYTES,
            max_get_bytes=limits.MAX_SHARD_BYTES,
        )
        policy = RetryPolicy(attempts=section.attempts, deadline=section.deadline_seconds)
        limited = LimitedStore(MeteredStore(store, self._meter), bounds)
        return BoundedStore(RetryingStore(limited, self._rng, policy))


def _patience(section: PlaceSection) -> dict[str, object]:
    names = (
        *("concurrency", "requests_per_second", "connect_seconds"),
        *("silence_seconds", "deadline_seconds", "min_bytes_per_second"),
    )
    return {name: getattr(section, name) for name in names}


def _location(section: PlaceSection) -> S3Location:
    return S3Location(
        bucket=section.bucket,
        endpoint=section.endpoint or None,
        region=section.region,
        addressing=section.addressing,
        connect_timeout=section.connect_seconds,
        read_timeout=section.silence_seconds,
        min_rate=section.min_bytes_per_second,
        patience=min(60.0, section.deadline_seconds),
        connections=section.concurrency,
    )


def _is_this_machine(url: str) -> bool:
    return urlsplit(url).hostname in _THIS_MACHINE


class _TelemetryMeter(StoreMeter):
    """Counts into a node's telemetry."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__()
        self._telemetry = telemetry

    def add(self, operation: str, outcome: str, moved: int, seconds: float) -> None:
        self._telemetry.count(f"store_{operation}_{outcome}")
        self._telemetry.count(f"store_{operation}_bytes", moved)
        self._telemetry.count(f"store_{operation}_seconds", seconds)
