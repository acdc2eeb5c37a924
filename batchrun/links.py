"""The four links that put the top-level folders under the one import name.

`batchrun/engine`, `jobs`, `kernels` and `prefix_cache` are symbolic links to the folders beside `batchrun/`; a wheel holds
real folders in their place. An archive or a file system without links leaves small text files there, and every import of
them fails with a message that helps nobody.
"""

from pathlib import Path

from batchrun.errors import Refused

LINKED = ("engine", "jobs", "kernels", "prefix_cache")


def check_links(package: Path = Path(__file__).parent) -> None:
    """Refuse to start when one of the linked folders is not a folder.

    Raises:
        Refused: names the first one and says how to get a whole copy.
    """
    for name in LINKED:
        path = package / name
        if not path.is_dir():
            raise Refused(
                f"{path} is not a folder: this copy of batchrun was unpacked without its symbolic links; "
                "clone the repository with git on Linux or macOS (core.symlinks must not be false), or install the wheel"
            )
