"""TLS for the HTTP server, from the `tls_server_config` of an exporter-toolkit web configuration.

Imported only where TLS is configured. The options are Go's (crypto/tls); what Python's ssl module cannot do is refused
rather than ignored.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_OLD_VERSIONS = ("TLS10", "TLS11")
_CLIENT_AUTH = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_UNVERIFIED_CLIENT_AUTH = ("RequestClientCert", "RequireClientCert", "RequireAnyClientCert")
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
# Go's names (IANA's, but for two) and OpenSSL's. TLS 1.3 suites cannot be chosen, in Go either: accepted, no effect.
_TLS13_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_CIPHERS = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
}


class TlsError(ValueError):
    """An option that cannot be had. `key` is its name in the web configuration."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class TlsOptions:
    """The keys of `tls_server_config` that are supported, with the toolkit's names and defaults; paths are complete."""

    cert_file: Path | None = None
    key_file: Path | None = None
    client_auth_type: str = ""
    client_ca_file: Path | None = None
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that make it up, to be watched for changes."""
        return tuple(path for path in (self.cert_file, self.key_file, self.client_ca_file) if path is not None)


@dataclass(frozen=True)
class Tls:
    """A ready context, and who of the clients with a certificate may come in."""

    context: ssl.SSLContext
    allowed_sans: frozenset[str] = field(default_factory=frozenset)

    def identify(self, sock: ssl.SSLSocket) -> bool:
        """Tell, after the handshake, whether the client proved who it is by a certificate.

        Raises PermissionError when its certificate carries none of the allowed names.
        """
        if self.context.verify_mode == ssl.CERT_NONE:
            return False
        certificate = sock.getpeercert()
        if not certificate:
            return False
        if self.allowed_sans and self.allowed_sans.isdisjoint(_names(certificate)):
            raise PermissionError("the client's certificate has none of client_allowed_sans")
        return True


def make_tls(options: TlsOptions) -> Tls:
    """Read the files and make a context. Raises TlsError naming the key at fault."""
    if options.cert_file is None:
        raise TlsError("cert_file", "missing: TLS needs a certificate")
    if options.key_file is None:
        raise TlsError("key_file", "missing: TLS needs the certificate's private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _set_versions(context, options)
    _set_ciphers(context, options)
    _set_curve(context, options)
    _set_client_auth(context, options)
    _load_certificate(context, options.cert_file, options.key_file)
    return Tls(context, frozenset(options.client_allowed_sans))


def _load_certificate(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    for key, path in (("cert_file", cert_file), ("key_file", key_file)):
        _check_readable(key, path)
    try:
        # An empty password: without one, OpenSSL would ask for it on the terminal.
        context.load_cert_chain(cert_file, key_file, password="")
    except (OSError, ValueError) as error:
        raise TlsError("cert_file", f"{cert_file} with key {key_file}: {_reason(error)}") from error


def _set_versions(context: ssl.SSLContext, options: TlsOptions) -> None:
    lowest = _choose("min_version", options.min_version, _VERSIONS)
    highest = _choose("max_version", options.max_version, _VERSIONS)
    if lowest > highest:
        raise TlsError("min_version", f"{options.min_version} is above max_version {options.max_version}")
    context.minimum_version = lowest
    context.maximum_version = highest


def _set_ciphers(context: ssl.SSLContext, options: TlsOptions) -> None:
    if options.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if not options.cipher_suites:
        return
    names = [_choose("cipher_suites", name, _CIPHERS) for name in options.cipher_suites if name not in _TLS13_CIPHERS]
    if not names:  # TLS 1.3's only, so 1.2 has none left
        if context.maximum_version != ssl.TLSVersion.TLSv1_3:
            raise TlsError("cipher_suites", "none of them works with max_version TLS12")
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return
    try:
        context.set_ciphers(":".join(names))
    except ssl.SSLError as error:
        raise TlsError("cipher_suites", f"this system's OpenSSL offers none of them: {_reason(error)}") from error


def _set_curve(context: ssl.SSLContext, options: TlsOptions) -> None:
    if not options.curve_preferences:
        return
    curves = [_choose("curve_preferences", name, _CURVES) for name in options.curve_preferences]
    if len(curves) > 1:
        raise TlsError("curve_preferences", "one curve at most here; leave it out for the system's own order")
    try:
        context.set_ecdh_curve(curves[0])
    except (ValueError, ssl.SSLError) as error:
        raise TlsError("curve_preferences", f"this system's OpenSSL cannot be set to {curves[0]}") from error


def _set_client_auth(context: ssl.SSLContext, options: TlsOptions) -> None:
    if options.client_auth_type in _UNVERIFIED_CLIENT_AUTH:
        raise TlsError(
            "client_auth_type",
            f"{options.client_auth_type} accepts certificates unverified, which is not supported; "
            "use RequireAndVerifyClientCert or NoClientCert",
        )
    mode = _choose("client_auth_type", options.client_auth_type, _CLIENT_AUTH)
    if options.client_allowed_sans and mode != ssl.CERT_REQUIRED:
        raise TlsError("client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert")
    if mode == ssl.CERT_NONE:
        if options.client_ca_file is not None:
            raise TlsError("client_ca_file", "has no effect without client_auth_type: RequireAndVerifyClientCert")
        return
    if options.client_ca_file is None:
        raise TlsError("client_ca_file", f"missing: client_auth_type {options.client_auth_type} verifies against it")
    _check_readable("client_ca_file", options.client_ca_file)
    try:
        context.load_verify_locations(options.client_ca_file)
    except (OSError, ValueError) as error:
        raise TlsError("client_ca_file", f"{options.client_ca_file}: {_reason(error)}") from error
    context.verify_mode = mode


def _choose(key: str, name: str, choices: Mapping[str, _T]) -> _T:
    if name in choices:
        return choices[name]
    if name in _OLD_VERSIONS:
        raise TlsError(key, f"{name} is broken and not supported; expected TLS12 or TLS13")
    raise TlsError(key, f"unknown value {name!r}; expected one of {', '.join(filter(None, choices))}")


def _check_readable(key: str, path: Path) -> None:
    """Tell which file it is: the ssl module's own errors name none."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise TlsError(key, f"cannot read {path}: {error.strerror}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _names(certificate: Mapping[str, object]) -> set[str]:
    """Return the subject alternative names, IP addresses in their usual form."""
    names: set[str] = set()
    entries = certificate.get("subjectAltName", ())
    for kind, value in entries if isinstance(entries, tuple) else ():
        try:
            names.add(str(ipaddress.ip_address(value.strip())) if kind == "IP Address" else value)
        except ValueError:
            continue
    return names
