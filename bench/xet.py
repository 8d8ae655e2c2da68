"""hf-xet: its real client with its local store, a folder, without a network or a service.

The old version is uploaded first. The upload of the new version then adds new chunks and the shard that lists them,
which are the bytes that a network would transfer. Its session has threads of its own.
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
class UploadCost:
    """Bytes of new chunks and their shard, and seconds to upload and to download the new version."""

    nbytes: int
    upload: float
    download: float


def deduplicated(versions: Sequence[Weights]) -> list[UploadCost]:
    """Upload consecutive versions of weights, each as one file, and return the cost of each but the first.

    Raises:
        RuntimeError: the downloaded bytes are not the uploaded ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_XET_CACHE"] = str(Path(folder) / "cache")
        import hf_xet  # noqa: PLC0415 - it reads the variable

        session, endpoint = hf_xet.XetSession(), f"local://{folder}/store"
        rows = []
        for weights in versions:
            data = b"".join(raw_bytes(weights[name]) for name in sorted(weights))
            begin = time.perf_counter()
            commit = session.new_upload_commit(endpoint=endpoint)
            handle = commit.start_upload_bytes(data, sha256=hf_xet.SKIP_SHA256)
            report = commit.wait_to_finish()
            between = time.perf_counter()
            download = Path(folder) / "fetched"
            group = session.new_file_download_group(endpoint=endpoint)
            group.start_download_file(handle.result().xet_info, str(download))
            group.wait_to_finish()
            end = time.perf_counter()
            if download.read_bytes() != data:
                raise RuntimeError("hf-xet gave back something else")
            rows.append(UploadCost(report.dedup_metrics.total_bytes_uploaded, between - begin, end - between))
        return rows[1:]
