"""The published ways to send a weight update, as their papers and sources describe them, to compare against."""

from tests.support.patch_formats.published import FORMATS, Format

__all__ = ["FORMATS", "Format"]
