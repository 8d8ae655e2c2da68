"""hf-xet, the real one: its client against its own local store, a folder, without a network or a service.

The old version is uploaded first; what the upload of the new version then puts into the store (chunks that are not
there yet, and the shard that lists them) is what would travel. Its session runs threads of its own.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.digest import raw_bytes

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Uploaded:
    """Bytes of new chunks and their shard; seconds to upload and to fetch the new version."""

    nbytes: int
    upload: float
    download: float


def deduplicated(versions: Sequence[Weights]) -> list[Uploaded]:
    """Consecutive versions of weights, each as one file; one row for each but the first.

    Raises:
        RuntimeError: what was fetched is not what was uploaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_XET_CACHE"] = str(Path(folder) / "cache")
        import hf_xet

        session, endpoint = hf_xet.XetSession(), f"local://{folder}/store"
        rows = []
        for weights in versions:
            data = b"".join(raw_bytes(weights[name]) for name in sorted(weights))
            begin = time.perf_counter()
            commit = session.new_upload_commit(endpoint=endpoint)
            handle = commit.start_upload_bytes(data, sha256=hf_xet.SKIP_SHA256)
            report = commit.wait_to_finish()
            between = time.perf_counter()
            fetched = Path(folder) / "fetched"
            group = session.new_file_download_group(endpoint=endpoint)
            group.start_download_file(handle.result().xet_info, str(fetched))
            group.wait_to_finish()
            end = time.perf_counter()
            if fetched.read_bytes() != data:
                raise RuntimeError("hf-xet gave back something else")
            rows.append(Uploaded(report.dedup_metrics.total_bytes_uploaded, between - begin, end - between))
        return rows[1:]
