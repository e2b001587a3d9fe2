"""The one thing that pyproject.toml cannot say for good: a C file that is compiled where it can be.

It holds no Python and needs no headers of it, so one build serves every version; kvferry runs
without it (see kernels/kv_pack/host_compiled.py).
"""

from setuptools import Extension, setup

HEADERS = ("convert", "convert_loops", "convert_tile", "paged", "progress", "xxh3")

setup(
    ext_modules=[
        Extension(
            "kvferry.kernels.kv_pack._host_pack",
            ["kernels/kv_pack/host_pack.c"],
            depends=[f"kernels/kv_pack/{name}.h" for name in HEADERS],
            # A product is rounded before a sum, as it is where both are apart.
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
