"""What a web configuration file does to the server, and what is wrong with one that cannot be used."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import logging
import ssl
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent.server import Server
from agent.server.exchange import Limits
from agent.server.passwords import Passwords
from agent.server.webconfig import WebConfig, WebConfigError
from tests.agent.server.serving import GET, Answer, Client, Pages, becomes_true, connect, connect_unix, serving

TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key"
_HASHES = {"alice": bcrypt.hashpw(b"wonder", bcrypt.gensalt(4)).decode()}
_USERS = f"basic_auth_users: {{alice: {_HASHES['alice']}}}\n"


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, PEM."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, folder: Path, name: str) -> None:
        pem = serialization.Encoding.PEM
        (folder / f"{name}.crt").write_bytes(self.certificate.public_bytes(pem))
        plain = serialization.NoEncryption()
        (folder / f"{name}.key").write_bytes(self.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


def make_identity(name: str, issuer: Identity | None = None) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.timezone.utc)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.RFC822Name("ops@example.org")]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        # The rest is what a strict client (the default since Python 3.13) wants to see.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key((issuer.key if issuer else key).public_key()),
            critical=False,
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=issuer is None,
                crl_sign=issuer is None,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    return Identity(builder.sign(issuer.key if issuer else key, hashes.SHA256()), key)


@pytest.fixture(scope="module")
def identities() -> dict[str, Identity]:
    authority = make_identity("authority")
    return {
        "authority": authority,
        "server": make_identity("server", authority),
        "renewed": make_identity("renewed", authority),
        "client": make_identity("client", authority),
        "stranger": make_identity("stranger"),
    }


@pytest.fixture
def folder(tmp_path: Path, identities: dict[str, Identity]) -> Path:
    for name, identity in identities.items():
        identity.write(tmp_path, name)
    return tmp_path


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The hashes that bcrypt was really asked about."""
    asked: list[bytes] = []
    real = bcrypt.checkpw

    def note(password: bytes, hashed: bytes) -> bool:
        asked.append(hashed)
        return real(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", note)
    return asked


def write(folder: Path, text: str) -> Path:
    """Replace the file as a careful administrator's tools do, so that its inode tells."""
    path = folder / "web-config.yml"
    new = folder / "web-config.new"
    new.write_text(text)
    return new.replace(path)


def trusting(folder: Path, *, identity: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "authority.crt")
    if identity:
        context.load_cert_chain(folder / f"{identity}.crt", folder / f"{identity}.key")
    return context


def connect_tls(server: Server, context: ssl.SSLContext, name: str = "server") -> Client:
    plain = connect(server).sock
    try:
        return Client(context.wrap_socket(plain, server_hostname=name))
    except BaseException:
        plain.close()
        raise


def with_password(name: str, password: str) -> bytes:
    token = base64.b64encode(f"{name}:{password}".encode()).decode()
    return f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {token}\r\n\r\n".encode()


# What is refused


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- list", "expected keys with values"),
        ("a: [", "line 1: "),
        ("tls_config: {}", "tls_config: unknown key; expected one of tls_server_config, "),
        ("1: 2", "expected text as key, got 1"),
        ("rate_limit: {burst: 1}", "rate_limit: not supported"),
        ("basic_auth_users: {a: b}\nbasic_auth_users: {}", "line 2: duplicate key basic_auth_users"),
        (TLS + ", sni: x}", "tls_server_config.sni: unknown key"),
        (TLS + ", cert: x}", "tls_server_config.cert: not supported: use cert_file"),
        ("tls_server_config: {min_version: TLS12}", "tls_server_config.cert_file: missing"),
        ("tls_server_config: {cert_file: server.crt}", "tls_server_config.key_file: missing"),
        ("tls_server_config: {cert_file: 5}", "tls_server_config.cert_file: expected text, got 5"),
        ("tls_server_config: {cert_file: none.crt, key_file: server.key}", "cert_file: cannot read"),
        ("tls_server_config: {cert_file: server.crt, key_file: none.key}", "key_file: cannot read"),
        ("tls_server_config: {cert_file: server.crt, key_file: client.key}", "KEY_VALUES_MISMATCH"),
        (TLS + ", min_version: TLS10}", "tls_server_config.min_version: TLS10 is broken"),
        (TLS + ", max_version: SSL3}", "max_version: unknown value 'SSL3'; expected one of TLS12, TLS13"),
        (TLS + ", min_version: TLS13, max_version: TLS12}", "min_version: TLS13 is above max_version TLS12"),
        (TLS + ", cipher_suites: [RC4]}", "cipher_suites: unknown value 'RC4'"),
        (TLS + ", cipher_suites: TLS_X}", "cipher_suites: expected a list of texts"),
        (TLS + ", max_version: TLS12, cipher_suites: [TLS_AES_128_GCM_SHA256]}", "none of them works with"),
        (TLS + ", curve_preferences: [CurveP256, X25519]}", "curve_preferences: one curve at most"),
        (TLS + ", curve_preferences: [Curve1]}", "curve_preferences: unknown value 'Curve1'"),
        (TLS + ", prefer_server_cipher_suites: 1}", "prefer_server_cipher_suites: expected true or false, got 1"),
        (TLS + ", client_auth_type: RequestClientCert}", "client_auth_type: RequestClientCert accepts"),
        (TLS + ", client_auth_type: Maybe}", "client_auth_type: unknown value 'Maybe'"),
        (TLS + ", client_auth_type: RequireAndVerifyClientCert}", "client_ca_file: missing"),
        (TLS + ", client_ca_file: authority.crt}", "client_ca_file: has no effect"),
        (TLS + ", client_auth_type: VerifyClientCertIfGiven, client_ca_file: server.key}", "client_ca_file: "),
        (TLS + ", client_allowed_sans: [a]}", "client_allowed_sans: needs client_auth_type"),
        ("http_server_config: {http2: maybe}", "http_server_config.http2: expected true or false"),
        ("http_server_config: {headers: {Server: x}}", "http_server_config.headers.Server: unknown key"),
        ("http_server_config: {headers: {X-Frame-Options: x}}", "X-Frame-Options: expected deny or sameorigin"),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nB: c"}}', "expected printable ASCII"),
        ("basic_auth_users: {alice: wonder}", "basic_auth_users.alice: expected a bcrypt hash"),
        ("basic_auth_users: {'a:b': x}", "basic_auth_users.a:b: a user's name cannot have a colon"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line_with_file_and_key(folder: Path, text: str, complaint: str) -> None:
    path = write(folder, text)
    with pytest.raises(WebConfigError) as raised:
        WebConfig(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert complaint in message
    assert "\n" not in message
    assert "wonder" not in message


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"none\.yml: cannot be read: No such file"):
        WebConfig(tmp_path / "none.yml")


def test_an_encrypted_key_is_an_error_and_no_question_on_the_terminal(
    folder: Path, identities: dict[str, Identity]
) -> None:
    (folder / "server.key").write_bytes(
        identities["server"].key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(WebConfigError, match=r"tls_server_config\.cert_file: "):
        WebConfig(write(folder, TLS + "}"))


def test_an_empty_file_configures_nothing(folder: Path) -> None:
    settings = WebConfig(write(folder, "# nothing\n")).current()
    assert (settings.tls, settings.passwords, settings.headers) == (None, None, ())


def test_neither_tls_nor_bcrypt_is_loaded_unless_configured(folder: Path) -> None:
    path = write(folder, "http_server_config: {http2: false}")
    code = "import sys; from pathlib import Path; from agent.server.webconfig import WebConfig; "
    code += "WebConfig(Path(sys.argv[1])); sys.exit('agent.server.tls' in sys.modules or 'bcrypt' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=30)


# Headers


def test_headers_are_on_every_answer(folder: Path) -> None:
    headers = "{X-Frame-Options: deny, Strict-Transport-Security: max-age=5, X-XSS-Protection: ''}"
    web = WebConfig(write(folder, f"http_server_config: {{http2: true, headers: {headers}}}"))
    with serving(Pages(), web=web) as server, connect(server) as client:
        for answer in (client.ask(), client.ask(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n")):
            assert answer.headers["x-frame-options"] == "deny"
            assert answer.headers["strict-transport-security"] == "max-age=5"
            assert "x-xss-protection" not in answer.headers


# TLS


def test_metrics_are_served_encrypted_with_paths_relative_to_the_file(folder: Path) -> None:
    body = b"x" * 300_000
    with (
        serving(Pages(body), web=WebConfig(write(folder, TLS + "}"))) as server,
        connect_tls(server, trusting(folder)) as client,
    ):
        assert client.ask().body == body
        assert client.ask().body == body
        head = b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert client.ask(head).status == 200
        assert client.is_ended()


def test_the_end_of_a_tls_connection_is_announced(folder: Path) -> None:
    context = trusting(folder)
    with serving(Pages(), web=WebConfig(write(folder, TLS + "}"))) as server, connect(server) as plain:
        sock = context.wrap_socket(plain.sock, server_hostname="server", suppress_ragged_eofs=False)
        with Client(sock) as client:
            assert client.ask(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n").status == 405
            assert sock.recv(1) == b""


def test_a_plain_client_of_an_encrypted_port_gets_nothing(folder: Path) -> None:
    app = Pages()
    with serving(app, web=WebConfig(write(folder, TLS + "}"))) as server, connect(server) as client:
        client.send(GET)
        with pytest.raises((EOFError, ConnectionResetError)):
            client.read()
    assert app.requests == []


def test_a_silent_tls_client_blocks_nobody_and_is_ended(folder: Path) -> None:
    web = WebConfig(write(folder, TLS + "}"))
    with serving(Pages(), web=web, limits=Limits(head_timeout_s=0.5)) as server, connect(server) as silent:
        with connect_tls(server, trusting(folder)) as client:
            assert client.ask().status == 200
        assert silent.is_ended()
        assert becomes_true(lambda: server.connections == 0)


def test_a_tls_client_that_shakes_hands_makes_room_when_the_server_is_full(folder: Path) -> None:
    web = WebConfig(write(folder, TLS + "}"))
    with (
        serving(Pages(), web=web, limits=Limits(connections=1)) as server,
        connect(server) as silent,
        connect_tls(server, trusting(folder)) as client,
    ):
        assert client.ask().status == 200
        assert silent.is_ended()


def test_a_renewed_certificate_is_used_without_a_restart(folder: Path, identities: dict[str, Identity]) -> None:
    with (
        serving(Pages(), web=WebConfig(write(folder, TLS + "}"))) as server,
        connect_tls(server, trusting(folder)) as old,
    ):
        identities["renewed"].write(folder, "server")
        with connect_tls(server, trusting(folder), "renewed") as new:
            assert new.ask().status == 200
        assert old.ask().status == 200


def test_a_half_renewed_certificate_leaves_the_old_one_in_force(
    folder: Path, identities: dict[str, Identity], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Pages(), web=WebConfig(write(folder, TLS + "}"))) as server:
        (folder / "server.crt").write_bytes((folder / "renewed.crt").read_bytes())
        for _ in range(2):
            with connect_tls(server, trusting(folder)) as client:
                assert client.ask().status == 200
        assert len(caplog.records) == 1
        assert "KEY_VALUES_MISMATCH" in caplog.text
        identities["renewed"].write(folder, "server")
        with caplog.at_level(logging.INFO), connect_tls(server, trusting(folder), "renewed") as client:
            assert client.ask().status == 200


@pytest.mark.parametrize(
    ("options", "version", "cipher"),
    [
        (", max_version: TLS12, cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]", "TLSv1.2", "AES128-GCM"),
        (", max_version: TLS12, curve_preferences: [CurveP384]", "TLSv1.2", "ECDHE"),
        (", min_version: TLS13", "TLSv1.3", "TLS_"),
        (", cipher_suites: [TLS_AES_128_GCM_SHA256]", "TLSv1.3", "TLS_"),
        (", prefer_server_cipher_suites: false", "TLSv1.3", "TLS_"),
    ],
)
def test_versions_and_ciphers_are_those_configured(folder: Path, options: str, version: str, cipher: str) -> None:
    with (
        serving(Pages(), web=WebConfig(write(folder, TLS + options + "}"))) as server,
        connect_tls(server, trusting(folder)) as client,
    ):
        assert isinstance(client.sock, ssl.SSLSocket)
        assert client.sock.version() == version
        assert cipher in (client.sock.cipher() or ("",))[0]
        assert client.ask().status == 200


@pytest.mark.parametrize("options", [", min_version: TLS13", ", cipher_suites: [TLS_AES_128_GCM_SHA256]"])
def test_a_client_below_the_lowest_version_is_refused(folder: Path, options: str) -> None:
    context = trusting(folder)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        serving(Pages(), web=WebConfig(write(folder, TLS + options + "}"))) as server,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
    ):
        connect_tls(server, context)


def test_the_servers_cipher_preference_can_be_given_up(folder: Path) -> None:
    for preference in (True, False):
        text = f"{TLS}, prefer_server_cipher_suites: {str(preference).lower()}}}"
        tls = WebConfig(write(folder, text)).current().tls
        assert tls is not None
        assert bool(tls.context.options & ssl.OP_CIPHER_SERVER_PREFERENCE) is preference


def _ask_as(folder: Path, server: Server, identity: str | None) -> Answer | None:
    """None when the server does not let the client in. With TLS 1.3 that shows at the first read."""
    try:
        with connect_tls(server, trusting(folder, identity=identity)) as client:
            return client.ask()
    except (EOFError, OSError):
        return None


@pytest.mark.parametrize(
    ("options", "admitted"),
    [
        ("RequireAndVerifyClientCert", {"client"}),
        ("VerifyClientCertIfGiven", {"client", None}),
        ("RequireAndVerifyClientCert, client_allowed_sans: [client]", {"client"}),
        ("RequireAndVerifyClientCert, client_allowed_sans: [127.0.0.1, other]", {"client"}),
        ("RequireAndVerifyClientCert, client_allowed_sans: [other, clien]", set()),
    ],
)
def test_clients_are_admitted_by_their_certificates(folder: Path, options: str, admitted: set[str | None]) -> None:
    app = Pages()
    web = WebConfig(write(folder, f"{TLS}, client_ca_file: authority.crt, client_auth_type: {options}}}"))
    with serving(app, web=web) as server:
        assert {name for name in ("client", "stranger", None) if _ask_as(folder, server, name)} == admitted


# Passwords


def test_without_the_password_nothing_is_answered(folder: Path) -> None:
    app = Pages()
    with serving(app, web=WebConfig(write(folder, _USERS))) as server:
        for authorization in (
            "",
            "Authorization: Bearer x\r\n",
            "Authorization: Basic\r\n",
            "Authorization: Basic !\r\n",
            "Authorization: Basic YWxpY2U=\r\n",
            "Authorization: Basic \u00e9\r\n",
        ):
            with connect(server) as client:
                answer = client.ask(
                    f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{authorization}\r\n".encode("latin-1")
                )
                assert answer.status == 401
                assert answer.headers["www-authenticate"].startswith("Basic ")
        for name, password in (("alice", "Wonder"), ("bob", "wonder"), ("alice", ""), ("", "wonder"), ("alice", "\0")):
            with connect(server) as client:
                assert client.ask(with_password(name, password)).status == 401
    assert app.requests == []


def test_a_password_is_computed_once_and_then_known(folder: Path, checks: list[bytes]) -> None:
    app = Pages()
    with serving(app, web=WebConfig(write(folder, _USERS))) as server:
        for _ in range(2):
            with connect(server) as client:
                assert [client.ask(with_password("alice", "wonder")).status for _ in range(2)] == [200, 200]
    assert len(checks) == 1
    assert all(request.trusted for request in app.requests)


def test_an_unknown_user_costs_as_much_as_a_wrong_password_each_time(checks: list[bytes]) -> None:
    passwords = Passwords(_HASHES)
    tokens = ["Basic " + base64.b64encode(text).decode() for text in (b"bob:wonder", b"alice:x", b"bob:wonder")]
    assert [passwords.check(token) for token in tokens] == [False, False, False]
    assert checks == [_HASHES["alice"].encode()] * 3


def test_a_name_cannot_borrow_letters_of_the_password() -> None:
    passwords = Passwords({"ab": bcrypt.hashpw(b"c", bcrypt.gensalt(4)).decode()})
    assert passwords.check("Basic " + base64.b64encode(b"ab:c").decode()) is True
    assert passwords.check("Basic " + base64.b64encode(b"a:bc").decode()) is False


def test_a_password_beyond_bcrypts_72_bytes_is_cut_as_its_hash_was() -> None:
    long = b"p" * 72
    passwords = Passwords({"a": bcrypt.hashpw(long, bcrypt.gensalt(4)).decode()})
    assert passwords.check("Basic " + base64.b64encode(b"a:" + long + b"tail").decode()) is True


def test_guessing_leaves_known_passwords_and_the_server_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    web = WebConfig(write(folder, _USERS))
    with serving(Pages(), web=web, limits=Limits(connections=20)) as server:
        with connect(server) as client:
            assert client.ask(with_password("alice", "wonder")).status == 200
        passwords = web.current().passwords
        assert passwords is not None
        release = threading.Event()
        monkeypatch.setattr(passwords, "_bcrypt_check", lambda *_: release.wait(10) and False)
        guessers = [connect(server) for _ in range(8)]
        for guesser in guessers:
            guesser.send(with_password("alice", "guess"))
        assert becomes_true(lambda: passwords._room._value == 0)
        with connect(server) as client:
            answer = client.ask(with_password("alice", "another guess"))
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        with connect(server) as client:
            assert client.ask(with_password("alice", "wonder")).status == 200
        release.set()
        assert {guesser.read().status for guesser in guessers} == {401}
        for guesser in guessers:
            guesser.sock.close()


def test_a_changed_password_holds_on_open_connections_too(folder: Path) -> None:
    with serving(Pages(), web=WebConfig(write(folder, _USERS))) as server, connect(server) as client:
        assert client.ask(with_password("alice", "wonder")).status == 200
        hashed = bcrypt.hashpw(b"changed", bcrypt.gensalt(4)).decode()
        write(folder, f"basic_auth_users: {{alice: {hashed}}}")
        assert client.ask(with_password("alice", "wonder")).status == 401
        with connect(server) as again:
            assert again.ask(with_password("alice", "changed")).status == 200


def test_a_broken_change_keeps_the_door_locked(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(Pages(), web=WebConfig(write(folder, _USERS))) as server:
        for _ in range(2):
            path = write(folder, "basic_auth_users: {alice: ")
            with connect(server) as client:
                assert client.ask().status == 401
        path.unlink()
        with connect(server) as client:
            assert client.ask().status == 401
    assert [str(path) in record.message for record in caplog.records] == [True, True]


def test_the_control_socket_asks_for_no_password(folder: Path) -> None:
    path = folder / "s"
    with serving(Pages(), path, web=WebConfig(write(folder, _USERS + TLS + "}"))), connect_unix(path) as client:
        assert client.ask().status == 200
