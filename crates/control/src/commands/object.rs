use crate::qapi::Id;

use super::throttle::ThrottleGroupProperties;

union! {
    /// `ObjectOptions`: an object to be.
    ObjectOptions {
        /// Its name.
        id: Id = "id",
    }
    /// `ObjectType`
    kind: ObjectType = "qom-type" {
        /// Limits that several disks share.
        ThrottleGroup(ThrottleGroupProperties) = "throttle-group",
        /// A thread that serves virtqueues.
        Iothread(IothreadProperties) = "iothread",
    }
}

record! {
    /// `IothreadProperties`
    IothreadProperties {
        /// Longest look-out for the guest before the thread sleeps, in nanoseconds; 0: none.
        poll_max_ns: Option<u64> = "poll-max-ns",
    }
}

record! {
    /// Arguments of `object-del`.
    ObjectDel {
        /// Which.
        id: String = "id",
    }
}
