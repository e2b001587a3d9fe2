"""The one thing that pyproject.toml cannot say for good: C files, compiled where they can be.

They hold no Python and need no headers of it, so one build serves every version; kvferry runs
without them (see kernels/kv_pack/host_compiled.py and kernels/cpu/library.py).
"""

from pathlib import Path

from setuptools import Extension, setup


def optional_library(folder: str, sources: list[str], name: str, *options: str) -> Extension:
    """``kernels/FOLDER/SOURCE`` of each source, as a library there."""
    return Extension(
        f"kvferry.kernels.{folder}.{name}",
        [f"kernels/{folder}/{source}" for source in sources],
        depends=sorted(str(path) for path in Path("kernels").glob("*/*.h")),
        # A product is rounded before a sum, as it is where both are apart.
        extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", *options],
        extra_link_args=list(options),
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[
        optional_library("kv_pack", ["host_pack.c"], "_host_pack"),
        optional_library("cpu", ["cpu_ops.c", "elements.c"], "_cpu_ops", "-pthread"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
