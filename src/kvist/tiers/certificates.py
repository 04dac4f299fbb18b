"""Files of certificates and keys for TLS, tried when a store is opened, and not when it is used first."""

from __future__ import annotations

import ssl

from kvist.errors import ConfigError

__all__ = ["check_files"]


def check_files(files: dict[str, str]) -> None:
    """Raise ConfigError unless what lies in `ca_file`, `cert_file` and `key_file` can be loaded, as far as named."""
    try:
        context = ssl.create_default_context(cafile=files.get("ca_file"))
        if files.keys() & {"cert_file", "key_file"}:
            context.load_cert_chain(files.get("cert_file", ""), files.get("key_file"), password="")
    except OSError as error:  # ssl.SSLError is one
        told = ", ".join(f"{name} {value!r}" for name, value in files.items())
        raise ConfigError([f"{told}: no certificates can be loaded from there: {error}"]) from error
