//! librados and librbd, loaded when the first disk needs them and never unloaded.

use std::ffi::{c_char, c_int, c_void};
use std::sync::LazyLock;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};
use thiserror::Error;

/// An opaque pointer of the libraries: `rados_t`, `rados_ioctx_t`, `rbd_image_t` or `rbd_completion_t`.
pub(crate) type Pointer = *mut c_void;

/// `rbd_callback_t`
pub(crate) type OnComplete = extern "C" fn(completion: Pointer, arg: *mut c_void);

/// `rbd_update_callback_t`
pub(crate) type OnUpdate = extern "C" fn(arg: *mut c_void);

/// The callback of `rbd_diff_iterate2`
pub(crate) type OnExtent =
    extern "C" fn(at: u64, len: usize, exists: c_int, arg: *mut c_void) -> c_int;

/// `rbd_image_watcher_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Watcher {
    pub address: *mut c_char,
    pub client: i64,
    pub cookie: u64,
}

/// `rbd_snap_info_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SnapshotInfo {
    pub id: u64,
    pub size: u64,
    pub name: *const c_char,
}

impl SnapshotInfo {
    /// Space for one.
    pub const NONE: Self = Self {
        id: 0,
        size: 0,
        name: std::ptr::null(),
    };
}

/// `librbd_progress_fn_t`
type OnProgress = extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// Why librbd and librados cannot be used.
#[derive(Clone, Debug, Error)]
pub enum LibraryError {
    /// A library cannot be loaded.
    #[error(
        "rbd: needs {name}, which cannot be loaded ({why}); it is in the package {package} of Debian, Ubuntu, Fedora \
         and RHEL"
    )]
    Missing {
        name: &'static str,
        /// The package that contains it.
        package: &'static str,
        /// The dynamic linker's message.
        why: String,
    },
    /// A library lacks a function.
    #[error("{name} has no {function}, so it is older than Ceph 14; install a newer one")]
    Old {
        name: &'static str,
        function: &'static str,
    },
}

macro_rules! functions {
    ($($library:ident = $soname:literal in $package:literal { $(fn $name:ident($($arg:ty),*) $(-> $ret:ty)?;)+ })+) => {
        /// The functions that ringdisk calls, as `rados/librados.h` and `rbd/librbd.h` declare them.
        #[derive(Debug)]
        pub struct Library {
            $($(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)+)+
            /// Since librbd 1.16.
            pub(crate) rbd_aio_write_zeroes: Option<
                unsafe extern "C" fn(Pointer, u64, usize, Pointer, c_int, c_int) -> c_int,
            >,
            /// Since librbd 1.16.
            pub(crate) rbd_snap_create2: Option<
                unsafe extern "C" fn(Pointer, *const c_char, u32, OnProgress, *mut c_void) -> c_int,
            >,
            /// Since librbd 1.12.
            pub(crate) rbd_snap_get_trash_namespace: Option<
                unsafe extern "C" fn(Pointer, u64, *mut c_char, usize) -> c_int,
            >,
            /// Since librbd 1.12.
            pub(crate) rbd_snap_remove_by_id: Option<
                unsafe extern "C" fn(Pointer, u64) -> c_int,
            >,
            /// Since librados 14.
            pub(crate) rados_set_pool_full_try: Option<unsafe extern "C" fn(Pointer)>,
            /// Since librados 16.
            pub(crate) rados_blocklist_add: Option<
                unsafe extern "C" fn(Pointer, *mut c_char, u32) -> c_int,
            >,
        }

        fn load() -> Result<Library, LibraryError> {
            $(let $library = open($soname, $package)?;)+
            // SAFETY: the types match the functions' declarations.
            let library = unsafe {
                Library {
                    $($($name: find(&$library, $soname, stringify!($name))?,)+)+
                    rbd_aio_write_zeroes: [$(&$library),+]
                        .into_iter()
                        .find_map(|library| find(library, "", "rbd_aio_write_zeroes").ok()),
                    rbd_snap_create2: [$(&$library),+]
                        .into_iter()
                        .find_map(|library| find(library, "", "rbd_snap_create2").ok()),
                    rbd_snap_get_trash_namespace: [$(&$library),+]
                        .into_iter()
                        .find_map(|library| find(library, "", "rbd_snap_get_trash_namespace").ok()),
                    rbd_snap_remove_by_id: [$(&$library),+]
                        .into_iter()
                        .find_map(|library| find(library, "", "rbd_snap_remove_by_id").ok()),
                    rados_set_pool_full_try: [$(&$library),+]
                        .into_iter()
                        .find_map(|library| find(library, "", "rados_set_pool_full_try").ok()),
                    rados_blocklist_add: [$(&$library),+]
                        .into_iter()
                        .find_map(|library| find(library, "", "rados_blocklist_add").ok()),
                }
            };
            // Never unload the libraries: their threads may run as long as this process does.
            std::mem::forget([$($library),+]);
            Ok(library)
        }
    };
}

functions! {
    librados = "librados.so.2" in "librados2" {
        fn rados_version(*mut c_int, *mut c_int, *mut c_int);
        fn rados_create2(*mut Pointer, *const c_char, *const c_char, u64) -> c_int;
        fn rados_conf_read_file(Pointer, *const c_char) -> c_int;
        fn rados_conf_set(Pointer, *const c_char, *const c_char) -> c_int;
        fn rados_conf_get(Pointer, *const c_char, *mut c_char, usize) -> c_int;
        fn rados_connect(Pointer) -> c_int;
        fn rados_shutdown(Pointer);
        fn rados_get_instance_id(Pointer) -> u64;
        fn rados_ioctx_create(Pointer, *const c_char, *mut Pointer) -> c_int;
        fn rados_ioctx_destroy(Pointer);
        fn rados_ioctx_set_namespace(Pointer, *const c_char);
        fn rados_ioctx_get_id(Pointer) -> i64;
        fn rados_cluster_fsid(Pointer, *mut c_char, usize) -> c_int;
        fn rados_wait_for_latest_osdmap(Pointer) -> c_int;
        fn rados_exec(Pointer, *const c_char, *const c_char, *const c_char, *const c_char, usize, *mut c_char, usize) -> c_int;
        fn rados_get_last_version(Pointer) -> u64;
        fn rados_list_lockers(Pointer, *const c_char, *const c_char, *mut c_int, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize) -> isize;
        fn rados_create_write_op() -> Pointer;
        fn rados_release_write_op(Pointer);
        fn rados_write_op_assert_version(Pointer, u64);
        fn rados_write_op_setxattr(Pointer, *const c_char, *const c_char, usize);
        fn rados_write_op_rmxattr(Pointer, *const c_char);
        fn rados_write_op_exec(Pointer, *const c_char, *const c_char, *const c_char, usize, *mut c_int);
        fn rados_write_op_operate(Pointer, Pointer, *const c_char, *mut libc::time_t, c_int) -> c_int;
    }
    librbd = "librbd.so.1" in "librbd1" {
        fn rbd_version(*mut c_int, *mut c_int, *mut c_int);
        fn rbd_open(Pointer, *const c_char, *mut Pointer, *const c_char) -> c_int;
        fn rbd_open_read_only(Pointer, *const c_char, *mut Pointer, *const c_char) -> c_int;
        fn rbd_close(Pointer) -> c_int;
        fn rbd_get_size(Pointer, *mut u64) -> c_int;
        fn rbd_get_stripe_unit(Pointer, *mut u64) -> c_int;
        fn rbd_get_features(Pointer, *mut u64) -> c_int;
        fn rbd_get_flags(Pointer, *mut u64) -> c_int;
        fn rbd_get_overlap(Pointer, *mut u64) -> c_int;
        fn rbd_diff_iterate2(Pointer, *const c_char, u64, u64, u8, u8, OnExtent, *mut c_void) -> c_int;
        fn rbd_resize2(Pointer, u64, bool, OnProgress, *mut c_void) -> c_int;
        fn rbd_flush(Pointer) -> c_int;
        fn rbd_get_id(Pointer, *mut c_char, usize) -> c_int;
        fn rbd_snap_create(Pointer, *const c_char) -> c_int;
        fn rbd_snap_remove(Pointer, *const c_char) -> c_int;
        fn rbd_snap_list(Pointer, *mut SnapshotInfo, *mut c_int) -> c_int;
        fn rbd_snap_list_end(*mut SnapshotInfo);
        fn rbd_lock_release(Pointer) -> c_int;
        fn rbd_watchers_list(Pointer, *mut Watcher, *mut usize) -> c_int;
        fn rbd_watchers_list_cleanup(*mut Watcher, usize);
        fn rbd_update_watch(Pointer, *mut u64, OnUpdate, *mut c_void) -> c_int;
        fn rbd_update_unwatch(Pointer, u64) -> c_int;
        fn rbd_is_exclusive_lock_owner(Pointer, *mut c_int) -> c_int;
        fn rbd_metadata_get(Pointer, *const c_char, *mut c_char, *mut usize) -> c_int;
        fn rbd_pool_metadata_get(Pointer, *const c_char, *mut c_char, *mut usize) -> c_int;
        fn rbd_aio_create_completion(*mut c_void, Option<OnComplete>, *mut Pointer) -> c_int;
        fn rbd_aio_is_complete(Pointer) -> c_int;
        fn rbd_aio_get_return_value(Pointer) -> isize;
        fn rbd_aio_release(Pointer);
        fn rbd_aio_readv(Pointer, *const libc::iovec, c_int, u64, Pointer) -> c_int;
        fn rbd_aio_writev(Pointer, *const libc::iovec, c_int, u64, Pointer) -> c_int;
        fn rbd_aio_flush(Pointer, Pointer) -> c_int;
        fn rbd_aio_discard(Pointer, u64, u64, Pointer) -> c_int;
    }
}

impl Library {
    /// Loads the libraries at the first call, and returns them.
    ///
    /// # Errors
    /// The libraries are not installed, or too old.
    pub fn get() -> Result<&'static Self, LibraryError> {
        static LIBRARY: LazyLock<Result<Library, LibraryError>> = LazyLock::new(load);
        LIBRARY.as_ref().map_err(Clone::clone)
    }

    /// The versions of librbd and librados.
    pub fn versions(&self) -> (String, String) {
        let of = |version| numbers(version).map(|n| n.to_string()).join(".");
        (of(self.rbd_version), of(self.rados_version))
    }

    /// The major and minor version of librbd.
    pub(crate) fn version(&self) -> (c_int, c_int) {
        let [major, minor, _] = numbers(self.rbd_version);
        (major, minor)
    }
}

fn numbers(version: unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int)) -> [c_int; 3] {
    let mut parts = [0; 3];
    let [major, minor, extra] = &mut parts;
    // SAFETY: the call writes three numbers.
    unsafe { version(major, minor, extra) };
    parts
}

fn open(name: &'static str, package: &'static str) -> Result<Handle, LibraryError> {
    // SAFETY: a library's initialisation code is as sound as the library; these are the system's own libraries.
    let handle = unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
    handle.map_err(|e| LibraryError::Missing {
        name,
        package,
        why: e.to_string(),
    })
}

/// # Safety
/// `T` must be a pointer to a function of the type that the library declares.
unsafe fn find<T: Copy>(
    library: &Handle,
    name: &'static str,
    function: &'static str,
) -> Result<T, LibraryError> {
    // SAFETY: the caller guarantees the type, and the library is never unloaded.
    match unsafe { library.get::<T>(function.as_bytes()) } {
        Ok(found) => Ok(*found),
        Err(_) => Err(LibraryError::Old { name, function }),
    }
}

// ringdisk calls no function of this library by name. The library defines malloc, in place of the C library, for this
// process and the libraries that it loads.
#[cfg(feature = "tcmalloc")]
#[link(
    name = "libtcmalloc_minimal.so.4",
    kind = "dylib",
    modifiers = "+verbatim"
)]
unsafe extern "C" {}

/// Names this process's allocator, and says what that means. Each allocator is identified by a function that only it
/// defines.
pub(crate) fn allocator() -> (&'static str, &'static str) {
    let this = Handle::this();
    // SAFETY: the symbol is only looked up, not called.
    let has = |name: &str| unsafe { this.get::<*const c_void>(name.as_bytes()).is_ok() };
    let name = match () {
        () if has("tc_version") => "tcmalloc",
        () if has("mallctl") => "jemalloc",
        () if has("mi_version") => "mimalloc",
        () => {
            return (
                "libc malloc",
                "SLOW: librados allocates several times for each I/O, and with tcmalloc 4k reads take a seventh less CPU. \
                 The Debian package of ringdisk has it; else install libtcmalloc-minimal4, and build ringdisk with \
                 --features tcmalloc or start it with LD_PRELOAD=libtcmalloc_minimal.so.4",
            );
        }
    };
    (name, "librados allocates several times for each I/O")
}
