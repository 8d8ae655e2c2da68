"""What a site that harms others can cost them by the files of its payload."""

from dataclasses import replace
from typing import Final

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.outer.round_records import PayloadRef
from protocol.pseudogradient import in_memory, parts_of
from protocol.pseudogradient import parts as parts_module
from roles.trainer.outer.round_reader import HEAD_START, FetchedFiles, fetch_payloads
from tests.outer.methods import METHODS
from tests.outer.test_payload_files import _under_own_head
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.simulation.network import Log, key
from tests.support.simulation.outer_sites import SHAPES, SITE_SETTINGS, OuterTestbed

DENSE: Final = METHODS["dense"].model_copy(update={"local_steps": 3, "quorum": 2})


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_ELEMENTS", 400)
    monkeypatch.setattr(limits, "MIN_PAYLOAD_FILE_BYTES", 1)


async def test_a_payload_that_lacks_a_file_costs_the_coordinator_no_file_twice() -> None:
    testbed, attacker, reads = OuterTestbed(3, DENSE), key("site-2"), list[str]()
    testbed.site_settings = replace(SITE_SETTINGS, file_bytes=4096)

    class Counting(DecoratedStore):
        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            data = await super().get(path, max_bytes, offset=offset, size=size)
            if path.startswith(paths.kind_prefix(attacker.public, "payloads")):
                reads.append(path)
            return data

    async with testbed.running(testbed.names[:2], store=Counting(testbed.store)):
        await testbed.until_round(1)
        files, record = await _under_own_head(testbed)
        for file in files[:-1]:
            await testbed.store.put(paths.payload(attacker.public, 2, content_digest(file)), file)
        ref = PayloadRef(digest=content_digest(files[0]), size=len(files[0]), total=sum(map(len, files)))
        record = record.model_copy(update={"payload": ref})
        await testbed.store.put(record.path, sign(record, attacker))
        manifest = await testbed.until_round(2)
    assert testbed.reasons(manifest) == {"site-2": "withheld"}
    assert len(reads) == len(set(reads)) > 0, (len(reads), len(set(reads)))


async def test_a_worker_that_hangs_costs_one_head_start_and_not_one_for_each_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts_module, "PART_ELEMENTS", 1)
    testbed = OuterTestbed(2, DENSE)
    testbed.site_settings = replace(SITE_SETTINGS, file_bytes=1)

    class Hanging(DecoratedStore):
        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            if path.startswith(paths.kind_prefix(key("site-1").public, "payloads")):
                await trio.sleep_forever()
            return await super().get(path, max_bytes, offset=offset, size=size)

    async with testbed.running():
        manifest = await testbed.until_round(1)
    node = testbed.node(Log("reader"), MemoryStore(), key("reader"), Hanging(testbed.store))
    monkeypatch.setattr("roles.trainer.outer.round_reader._AT_ONCE", 1)
    begin = trio.current_time()
    counted = [item for item in manifest.counted if item.worker == key("site-1").public]
    (payload,) = await fetch_payloads(node, manifest.trainer, 1, counted, parts_of(SHAPES), FetchedFiles(in_memory))
    assert len(payload) == 3
    assert trio.current_time() - begin < HEAD_START + 1, trio.current_time() - begin
