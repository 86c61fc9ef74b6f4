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
