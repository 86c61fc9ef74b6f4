//! Clients with TLS, and those without it.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use testkit::driver::HANG;
use testkit::server::Server;

use super::commands::stop_successor;
use super::raw::Client;
use super::{BINARY, Served, have, run, text};
use crate::support::{DISK_BYTES, Disk};

const TOOLS: [&str; 5] = ["openssl", "nbdinfo", "nbdcopy", "qemu-img", "qemu-io"];

const STARTTLS: u32 = 5;
const POLICY: u32 = 2 | 1 << 31;
const TLS_REQUIRED: u32 = 5 | 1 << 31;

/// An authority that signs certificates, in files with QEMU's names.
struct Authority(PathBuf);

impl Authority {
    fn new(dir: PathBuf) -> Self {
        fs::create_dir(&dir).unwrap();
        let made = Self(dir);
        let options = [
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=authority",
            "-keyout ca-key.pem -out ca-cert.pem -addext keyUsage=critical,keyCertSign,cRLSign",
        ];
        made.openssl(&options.join(" "));
        made
    }

    fn openssl(&self, options: &str) {
        let mut openssl = Command::new("openssl");
        openssl.args(options.split(' ')).current_dir(&self.0);
        let output = openssl.output().unwrap();
        assert!(output.status.success(), "{options}: {output:?}");
    }

    /// A directory with the certificate of a `server` or a `client`, and that of the authority.
    fn sign(&self, kind: &str, name: &str) -> PathBuf {
        let dir = self.0.join(name);
        fs::create_dir(&dir).unwrap();
        let extensions = format!(
            "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature,keyEncipherment\n\
             extendedKeyUsage={kind}Auth\nsubjectAltName=IP:127.0.0.1\n"
        );
        fs::write(dir.join("extensions"), extensions).unwrap();
        let (key, certificate) = (
            format!("{name}/{kind}-key.pem"),
            format!("{name}/{kind}-cert.pem"),
        );
        self.openssl(&format!(
            "req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {key} -out {name}/request"
        ));
        self.openssl(&format!(
            "x509 -req -in {name}/request -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 -extfile \
             {name}/extensions -out {certificate}"
        ));
        fs::copy(self.0.join("ca-cert.pem"), dir.join("ca-cert.pem")).unwrap();
        dir
    }

    /// Revokes a client's certificate, and tells a server.
    fn revoke(&self, client: &str, server: &Path) {
        let configuration = "[ca]\ndefault_ca=d\n[d]\ndatabase=index\ncrlnumber=number\ndefault_md=sha256\n\
             default_crl_days=2\ncrl_extensions=e\n[e]\nauthorityKeyIdentifier=keyid\n";
        fs::write(self.0.join("ca.cnf"), configuration).unwrap();
        fs::write(self.0.join("index"), "").unwrap();
        fs::write(self.0.join("number"), "01\n").unwrap();
        let ca = "ca -config ca.cnf -keyfile ca-key.pem -cert ca-cert.pem";
        self.openssl(&format!("{ca} -revoke {client}/client-cert.pem"));
        self.openssl(&format!("{ca} -gencrl -out crl.pem"));
        fs::copy(self.0.join("crl.pem"), server.join("ca-crl.pem")).unwrap();
    }
}

/// A server at a TCP port, its disk `vm`, and its authority.
struct Secured {
    served: Served,
    authority: Authority,
    client: PathBuf,
    certificates: PathBuf,
}

impl Secured {
    fn start(configuration: &str) -> Self {
        Self::start_with(configuration, |_, _| {})
    }

    /// `prepare` gets the authority and the directory of the server.
    fn start_with(configuration: &str, prepare: impl Fn(&Authority, &Path)) -> Self {
        let (disk, dir) = (
            Disk::new(),
            tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        );
        let authority = Authority::new(dir.path().join("authority"));
        let certificates = authority.sign("server", "server");
        let client = authority.sign("client", "client");
        prepare(&authority, &certificates);
        let config = dir.path().join("ringdisk.toml");
        let text = format!(
            "nbd = \"127.0.0.1:0\"\nnbd-tls = \"{}\"\n{configuration}\n[[disk]]\nname = \"vm\"\nfile = \"{}\"\nsocket = \
             \"{}\"\n[[export]]\ndisk = \"vm\"\nwritable = \"on\"\n",
            certificates.display(),
            disk.file.display(),
            disk.socket.display()
        );
        fs::write(&config, text).unwrap();
        let mut command = Command::new(BINARY);
        command.args(["serve", "--json", "--config"]).arg(&config);
        command.arg("--control").arg(dir.path().join("control.qmp"));
        let server = Server::ringdisk_command(command).unwrap();
        let served = Served { server, disk, dir };
        Self {
            served,
            authority,
            client,
            certificates,
        }
    }

    /// As 'ringdisk export' tells it.
    fn uri(&self) -> String {
        let list = self.served.done(&["export"]);
        list[0]["uri"].as_str().unwrap().to_owned()
    }

    fn port(&self) -> String {
        let uri = self.uri();
        let rest = uri.strip_prefix("nbds://127.0.0.1:").expect("TLS");
        rest.split('/').next().unwrap().to_owned()
    }

    /// What nbdinfo says of the size with the certificates of a directory, or why it does not.
    fn size(&self, certificates: &Path) -> Result<String, String> {
        let uri = format!("{}?tls-certificates={}", self.uri(), certificates.display());
        let output = Command::new("nbdinfo").args(["--size", &uri]).output();
        let output = output.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        }
    }

    /// Runs QEMU's tools with the image's options at the end.
    fn qemu(&self, program: &str, arguments: &[&str]) -> String {
        let object = format!(
            "tls-creds-x509,id=tls0,endpoint=client,dir={}",
            self.client.display()
        );
        let image = format!(
            "driver=nbd,host=127.0.0.1,port={},export=vm,tls-creds=tls0",
            self.port()
        );
        let (first, rest) = match arguments {
            [first, rest @ ..] if program == "qemu-img" => (vec![*first], rest),
            all => (vec![], all),
        };
        let options = ["--object", &object, "--image-opts"];
        run(
            program,
            &[&first, &options[..], rest, &[image.as_str()]].concat(),
        )
    }
}

/// The recipes for another host, which has a client's certificate: a full backup, and an increment.
#[test]
fn another_host_copies_backups() {
    if !have(&TOOLS, "another_host_copies_backups") {
        return;
    }
    let secured = Secured::start("");
    let (served, client) = (&secured.served, secured.client.display());
    let path = |name: &str| served.dir.path().join(name).display().to_string();
    let write = |at: u64, byte: u8| {
        let pattern = format!("write -P {byte} {at} 65536");
        secured.qemu("qemu-io", &["-c", &pattern]);
    };
    let before = fs::read(&served.disk.file).unwrap();
    write(1 << 20, 1);
    let uri = |begun: &Value| {
        let uri = begun[0]["uri"].as_str().unwrap();
        format!("{uri}?tls-certificates={client}")
    };
    let begin = ["backup", "begin", "vm", "--bitmap=nightly"];
    let full = served.done(&begin);
    write(1 << 20, 2);
    run("nbdcopy", &["--connections=4", &uri(&full), &path("full")]);
    served.done(&["backup", "end"]);

    let second = served.done(&begin);
    assert_eq!(second[0]["bitmap-action"], "used");
    write(2 << 20, 3);
    let map = ["--json", "--map=qemu:dirty-bitmap:nightly", &uri(&second)];
    let map: Value = serde_json::from_str(&run("nbdinfo", &map)).unwrap();
    let is_dirty = |extent: &&Value| extent["type"] == 1;
    let dirty: Vec<_> = map.as_array().unwrap().iter().filter(is_dirty).collect();
    assert_eq!(dirty.len(), 1, "{map}");
    assert_eq!(
        (&dirty[0]["offset"], &dirty[0]["length"]),
        (&json!(1 << 20), &json!(65536))
    );
    let object = format!("tls-creds-x509,id=tls,endpoint=client,dir={client}");
    let backing = json!({
        "driver": "nbd",
        "server": { "type": "inet", "host": "127.0.0.1", "port": secured.port() },
        "export": "vm-backup",
        "tls-creds": "tls",
    });
    let backing = json!({ "driver": "raw", "file": backing });
    let (backing, overlay) = (format!("json:{backing}"), path("increment"));
    let create = [
        "create", "-q", "--object", &object, "-f", "qcow2", "-F", "raw", "-b",
    ];
    run("qemu-img", &[&create[..], &[&backing, &overlay]].concat());
    let read = [
        "--object",
        &object,
        "-C",
        "-c",
        "read 1048576 65536",
        &overlay,
    ];
    run("qemu-io", &read);
    served.done(&["backup", "end"]);
    run(
        "qemu-img",
        &["rebase", "-u", "-F", "raw", "-b", &path("full"), &overlay],
    );
    run(
        "qemu-img",
        &["convert", "-O", "raw", &overlay, &path("restored")],
    );
    for (name, byte) in [("full", 1), ("restored", 2)] {
        let content = fs::read(path(name)).unwrap();
        let at = |offset: usize| &content[offset..offset + 65536];
        assert!(at(1 << 20).iter().all(|&b| b == byte), "{name}");
        assert_eq!(at(2 << 20), &before[2 << 20..][..65536], "{name}");
    }
}

/// Everything that clients write and read goes through TLS, with several connections and with the longest requests.
#[test]
fn clients_use_tls() {
    if !have(&TOOLS, "clients_use_tls") {
        return;
    }
    let secured = Secured::start("");
    assert_eq!(secured.size(&secured.client), Ok(DISK_BYTES.to_string()));
    let uri = format!(
        "{}?tls-certificates={}",
        secured.uri(),
        secured.client.display()
    );
    let (new, copy) = (
        secured.served.path("new.raw"),
        secured.served.path("copy.raw"),
    );
    let content: Vec<u8> = (0..DISK_BYTES).map(|i| (i / 4096 * 7 + i) as u8).collect();
    fs::write(&new, &content).unwrap();
    for size in ["33554432", "4096"] {
        let size = format!("--request-size={size}");
        let options = ["--flush", "--connections=4", &size];
        run("nbdcopy", &[&options[..], &[text(&new), &uri]].concat());
        run("nbdcopy", &[&options[1..], &[&uri, text(&copy)]].concat());
        assert!(fs::read(&copy).unwrap() == content);
        assert!(fs::read(&secured.served.disk.file).unwrap() == content);
    }
    let commands = [
        "-c",
        "write -P 7 1M 2M",
        "-c",
        "flush",
        "-c",
        "read -P 7 1M 2M",
    ];
    secured.qemu("qemu-io", &commands);
    let written = fs::read(&secured.served.disk.file).unwrap();
    assert_eq!(written[1 << 20..3 << 20], [7; 2 << 20]);
    assert!(
        secured
            .qemu("qemu-img", &["map", "--output=json"])
            .contains("\"data\": true")
    );
}

/// An attacker on the path adds or removes something: nothing is told without TLS, and nothing from before it is used.
#[test]
fn nothing_is_negotiated_before_tls() {
    if !have(&TOOLS[..1], "nothing_is_negotiated_before_tls") {
        return;
    }
    let secured = Secured::start("");
    let address = format!("127.0.0.1:{}", secured.port());
    let mut client = Client::greeted_at(&address);
    for option in [3, 8, 11, 7, 10, 99] {
        client.option(option, &[]);
        assert_eq!(client.option_reply().0, TLS_REQUIRED, "{option}");
    }
    client.option(1, b"vm");
    client.expect_end();
    let mut client = Client::greeted_at(&address);
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend([STARTTLS.to_be_bytes(), [0; 4]].concat());
    bytes.extend(b"IHAVEOPT\0\0\0\x08\0\0\0\0");
    client.send(&bytes);
    client.expect_end();
    let log = &secured.served.server;
    log.wait_for_log(&["NBD", "disconnected", "TLS"]);
    // What is no TLS.
    let mut client = Client::greeted_at(&address);
    client.option(STARTTLS, &[]);
    assert_eq!(client.option_reply().0, 1);
    client.send(&[0x55; 64]);
    client.expect_end();
    // A server without TLS.
    let served = Served::start(Disk::new(), "");
    let mut client = Client::greeted(&served.nbd());
    client.option(STARTTLS, &[]);
    assert_eq!(client.option_reply().0, POLICY);
}

#[test]
fn clients_need_a_certificate_of_the_authority() {
    if !have(&TOOLS, "clients_need_a_certificate_of_the_authority") {
        return;
    }
    let strict = Secured::start_with("", |authority, server| {
        authority.sign("client", "revoked");
        authority.revoke("revoked", server);
    });
    let other = Authority::new(strict.served.path("other"));
    // It knows the server's authority, and has a certificate of another one.
    let stranger = other.sign("client", "stranger");
    let authority = strict.authority.0.join("ca-cert.pem");
    fs::copy(&authority, stranger.join("ca-cert.pem")).unwrap();
    let nobody = strict.served.path("nobody");
    fs::create_dir(&nobody).unwrap();
    fs::copy(&authority, nobody.join("ca-cert.pem")).unwrap();
    assert!(strict.size(&strict.client).is_ok());
    for refused in [&stranger, &nobody, &strict.authority.0.join("revoked")] {
        assert!(strict.size(refused).is_err(), "{}", refused.display());
    }
    let plain = strict.uri().replace("nbds:", "nbd:");
    let plain = Command::new("nbdinfo").arg(plain).output().unwrap();
    assert!(!plain.status.success(), "{plain:?}");
    drop(strict);

    let open = Secured::start("nbd-tls-verify-peer = \"off\"");
    let nobody = open.served.path("nobody");
    fs::create_dir(&nobody).unwrap();
    let authority = open.authority.0.join("ca-cert.pem");
    fs::copy(&authority, nobody.join("ca-cert.pem")).unwrap();
    assert_eq!(open.size(&nobody), Ok(DISK_BYTES.to_string()));
    // The client does not trust another server.
    let other = Authority::new(open.served.path("other"));
    let error = open.size(&other.sign("client", "client")).unwrap_err();
    assert!(error.contains("certificate"), "{error}");
}

/// Peers that say nothing, more than there are places for, and some that send without end: a client with a certificate is served,
/// and so are clients that are connected.
#[test]
fn peers_without_a_certificate_keep_nobody_out() {
    if !have(&TOOLS, "peers_without_a_certificate_keep_nobody_out") {
        return;
    }
    let secured = Secured::start("");
    let address = format!("127.0.0.1:{}", secured.port());
    let silent: Vec<_> = (0..150)
        .map(|_| TcpStream::connect(&address).unwrap())
        .collect();
    assert_eq!(secured.size(&secured.client), Ok(DISK_BYTES.to_string()));
    let log = &secured.served.server;
    log.wait_for_log(&["NBD", "64 peers are in the handshake", "it came first"]);
    drop(silent);
    for (option, len, times) in [(99, 1 << 20, 1), (99, 16 << 10, 5), (3, 0, 33)] {
        let client = Client::greeted_at(&address);
        let header = [
            b"IHAVEOPT",
            &[option, len].map(u32::to_be_bytes).concat()[..],
        ]
        .concat();
        for _ in 0..times {
            // The server may have ended the connection already.
            let bytes = [&header[..], &vec![0; len as usize]].concat();
            let _ = client.stream().write_all(&bytes);
        }
        client.expect_end();
    }
    assert_eq!(secured.size(&secured.client), Ok(DISK_BYTES.to_string()));
}

/// Certificates are added and removed by command, and the next process reads them again.
#[test]
fn certificates_are_objects_as_in_qemu() {
    if !have(&TOOLS, "certificates_are_objects_as_in_qemu") {
        return;
    }
    let mut secured = Secured::start("");
    let call = |command: &str, arguments| {
        let control = secured.served.path("control.qmp");
        let mut qmp = control::Client::connect(control, HANG).unwrap();
        qmp.call(command, arguments).map_err(|e| e.to_string())
    };
    let dir = &secured.certificates;
    let tls0 =
        json!({ "qom-type": "tls-creds-x509", "id": "tls0", "endpoint": "server", "dir": dir });
    let inet = json!({ "type": "inet", "data": { "host": "127.0.0.1", "port": secured.port() } });
    let start = json!({ "addr": inet, "tls-creds": "tls0" });
    call("nbd-server-stop", json!({})).unwrap();
    let error = call("nbd-server-start", start.clone()).unwrap_err();
    assert!(error.contains("no tls-creds-x509 'tls0'"), "{error}");
    call("object-add", tls0.clone()).unwrap();
    let error = call("object-add", tls0).unwrap_err();
    assert!(error.contains("'tls0' already"), "{error}");
    let unix = secured.served.path("nbd.sock");
    let unix = json!({ "type": "unix", "data": { "path": unix } });
    let start = json!({ "addr": unix, "tls-creds": "tls0" });
    call("nbd-server-start", start).unwrap();
    let error = call("object-del", json!({ "id": "tls0" })).unwrap_err();
    assert!(error.contains("the NBD server uses 'tls0'"), "{error}");
    secured.served.done(&["export", "vm"]);
    let uri = |client: &Path| {
        let uri = secured.uri();
        assert!(uri.starts_with("nbds+unix:///vm?socket="), "{uri}");
        format!("{uri}&tls-certificates={}", client.display())
    };
    run("nbdinfo", &[&uri(&secured.client)]);

    // A new authority: the next process has its certificates.
    let next = Authority::new(secured.served.path("next"));
    let (server, client) = (next.sign("server", "server"), next.sign("client", "client"));
    for file in ["server-cert.pem", "server-key.pem", "ca-cert.pem"] {
        fs::copy(server.join(file), secured.certificates.join(file)).unwrap();
    }
    let pid = secured.served.server.pid();
    let control = secured.served.path("control.qmp");
    run(BINARY, &["upgrade", "--control", text(&control)]);
    testkit::server::wait_for_exit(pid);
    run("nbdinfo", &[&uri(&client)]);
    let error = call("object-del", json!({ "id": "tls0" })).unwrap_err();
    assert!(error.contains("the NBD server uses 'tls0'"), "{error}");
    call("nbd-server-stop", json!({})).unwrap();
    call("object-del", json!({ "id": "tls0" })).unwrap();
    stop_successor(&secured.served);
    secured.client = client;
}

/// ringdisk says what is wrong, and does not start without TLS.
#[test]
fn bad_certificates_are_named() {
    if !have(&TOOLS[..1], "bad_certificates_are_named") {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let authority = Authority::new(dir.path().join("authority"));
    let (good, other) = (
        authority.sign("server", "good"),
        authority.sign("server", "other"),
    );
    let start = |certificates: &Path| {
        let disk = Disk::new();
        let mut command = Command::new(BINARY);
        command.args(["serve", "--json", "--control"]);
        command.arg(dir.path().join("control.qmp"));
        command.args(["--nbd", "127.0.0.1:0", "--nbd-tls"]);
        command.arg(certificates).arg(disk.argument("name=vm"));
        Server::ringdisk_command(command).map(drop)
    };
    start(&good).unwrap();
    let refused = |words: &[&str]| {
        let error = start(&good).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{error}");
        }
    };
    let key = fs::read(good.join("server-key.pem")).unwrap();
    fs::copy(other.join("server-key.pem"), good.join("server-key.pem")).unwrap();
    refused(&["server-cert.pem", "KeyMismatch"]);
    fs::write(good.join("server-key.pem"), "").unwrap();
    refused(&["server-key.pem"]);
    fs::remove_file(good.join("server-key.pem")).unwrap();
    refused(&["server-key.pem", "No such file"]);
    fs::write(good.join("server-key.pem"), key).unwrap();
    fs::write(good.join("ca-cert.pem"), "nothing").unwrap();
    refused(&["ca-cert.pem"]);
}

/// If an upgrade finds certificates that cannot be used, the old process continues, at all of its sockets. The command names
/// the backups that have failed.
#[test]
fn upgrade_with_bad_certificates_changes_no_socket() {
    if !have(&TOOLS, "upgrade_with_bad_certificates_changes_no_socket") {
        return;
    }
    let secured = Secured::start("");
    let control = secured.served.path("control.qmp");
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(BINARY);
        command.args(arguments).arg("--control").arg(&control);
        command.output().unwrap()
    };
    let begun = ringdisk(&["backup", "begin", "vm", "--id=lost"]);
    assert!(begun.status.success(), "{begun:?}");
    let certificate = secured.certificates.join("server-cert.pem");
    let good = fs::read(&certificate).unwrap();
    fs::write(&certificate, "nothing").unwrap();
    for words in ["begin them again: lost", "continues to serve"] {
        let output = ringdisk(&["upgrade"]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(words), "{error}");
        assert!(error.contains("server-cert.pem"), "{error}");
        assert!(ringdisk(&["list"]).status.success());
    }
    fs::write(&certificate, good).unwrap();
    let upgraded = ringdisk(&["upgrade"]);
    let text = String::from_utf8_lossy(&upgraded.stdout).into_owned();
    assert!(upgraded.status.success(), "{upgraded:?}");
    assert!(!text.contains("backups"), "{text}");
    stop_successor(&secured.served);
}
