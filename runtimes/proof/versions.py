"""An onnxruntime that a bundle was not verified with: an older one is refused, a newer one has to prove itself once."""

import logging
from typing import Any

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BackendUnavailable, ParityFailed
from fatdeploy.measured import kept
from fatdeploy.runtimes.engines.ort.sessions import release
from fatdeploy.runtimes.engines.protocol import Engine

log = logging.getLogger("fatdeploy")


def prove_version(bundle: Bundle, engine: Engine[Any], version: str) -> None:
    """Run a bundle's probes if its range of versions does not contain this one; a miss is BackendUnavailable.

    A success is kept: the same bundle, version and machine need no second proof.
    """
    if bundle.manifest.onnxruntime is None:
        return
    oldest, newest = bundle.manifest.onnxruntime
    if is_between(oldest, version, newest):
        return
    try:
        kept("proved", f"{bundle.digest}|onnxruntime {version}", lambda: _proved(bundle, engine, version))
    except ParityFailed as error:
        raise BackendUnavailable(
            f"{bundle.path} was verified with onnxruntime {oldest} to {newest}, and with {version}, which is installed "
            f"here, it does not keep its promise: {error}. Install the former: pip install onnxruntime=={newest}"
        ) from error


def _proved(bundle: Bundle, engine: Engine[Any], version: str) -> bool:
    # Imported on use: most loads need none of it.
    from fatdeploy.runtimes.proof.verify import verified_bundle

    log.info("%s was not verified with onnxruntime %s: running its probes once", bundle.path, version)
    verified_bundle(bundle, engine)
    return True


def is_between(oldest: str, version: str, newest: str) -> bool:
    """Return whether a version lies in a range."""
    return release(oldest) <= release(version) <= release(newest)
