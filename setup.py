"""The native pump of the udp backend. Everything else about the package is in setup.cfg."""

from setuptools import Extension, setup

NATIVE = "backends/udp/native"

setup(
    ext_modules=[
        Extension(
            "backends.udp._pump",
            sources=[f"{NATIVE}/{name}.c" for name in ("coalesce", "module", "packet", "pump", "routes", "segment")],
            depends=[f"{NATIVE}/{name}.h" for name in ("coalesce", "packet", "pump", "routes", "segment")],
            # The checksum loop gains from vectors.
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra"],
            # Without a compiler the installation succeeds all the same, with the pump in Python.
            optional=True,
        )
    ]
)
