use crate::qapi::Id;

use super::throttle::ThrottleGroupProperties;

union! {
    /// `ObjectOptions`: an object to be created.
    ObjectOptions {
        id: Id = "id",
    }
    /// `ObjectType`
    kind: ObjectType = "qom-type" {
        /// I/O limits that several disks share.
        ThrottleGroup(ThrottleGroupProperties) = "throttle-group",
        /// A thread that serves virtqueues.
        Iothread(IothreadProperties) = "iothread",
        /// The certificates of the NBD server.
        TlsCredsX509(TlsCredsX509Properties) = "tls-creds-x509",
    }
}

record! {
    /// `TlsCredsX509Properties`
    TlsCredsX509Properties {
        /// The directory with `server-cert.pem`, `server-key.pem`, `ca-cert.pem` and, if there is one, `ca-crl.pem`.
        dir: Option<String> = "dir",
        /// Whose certificate it is. ringdisk has only servers, and it is that of a client if absent, as in QEMU.
        endpoint: Option<TlsCredsEndpoint> = "endpoint",
        /// Whether clients need a certificate of the authority; true if absent.
        verify_peer: Option<bool> = "verify-peer",
    }
}

words! {
    /// `QCryptoTLSCredsEndpoint`
    TlsCredsEndpoint {
        /// That of a client.
        Client = "client",
        /// That of a server.
        Server = "server",
    }
}

record! {
    /// `IothreadProperties`
    IothreadProperties {
        /// The longest time that the thread polls for guest requests before it sleeps, in nanoseconds; 0 disables
        /// polling.
        poll_max_ns: Option<u64> = "poll-max-ns",
    }
}

record! {
    /// Arguments of `object-del`.
    ObjectDel {
        id: String = "id",
    }
}
