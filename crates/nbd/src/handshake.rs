//! The handshake: from the greeting to the transmission phase (fixed newstyle).

use thiserror::Error;

use crate::Mode;
use crate::fields::Fields;

/// Limit of the length of an export's name or of a query in bytes, as in the specification.
pub const NAME_BYTES_MAX: usize = 4096;

/// Limit of the queries in one option.
pub const QUERIES_MAX: u32 = 64;

/// Limit of the data of an option in bytes; the data of longer ones is skipped. A name and some long queries fit.
pub const OPTION_BYTES_MAX: usize = 32 << 10;

/// Limit of the data that is skipped for one option in bytes. A client with a longer one is disconnected.
const SKIP_BYTES_MAX: u32 = 1 << 20;

/// Limit of the exports of a server.
pub const EXPORTS_MAX: usize = 4096;

/// Limit of options in one handshake. A client that lists exports sends up to three for each: information, and the contexts with
/// and without a query.
pub const OPTIONS_MAX: usize = 3 * EXPORTS_MAX + 256;

/// Limit of the bytes of all options in one handshake: a name, and some queries, in each of them. 55 MB.
const BYTES_MAX: u64 = (OPTIONS_MAX * (NAME_BYTES_MAX + 256)) as u64;

/// A part of the list of exports ends with the entry that reaches so many bytes: all of it could take 33 MiB for each client.
const LIST_BYTES: usize = 64 << 10;

/// The same for what comes before TLS, where nothing can be negotiated.
const OPTIONS_BEFORE_TLS_MAX: usize = 32;
const BYTES_BEFORE_TLS_MAX: u64 = 64 << 10;

const INIT_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

const FIXED_NEWSTYLE: u16 = 1 << 0;
const NO_ZEROES: u16 = 1 << 1;

const OPT_EXPORT_NAME: u32 = 1;
const OPT_ABORT: u32 = 2;
const OPT_LIST: u32 = 3;
const OPT_STARTTLS: u32 = 5;
const OPT_INFO: u32 = 6;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_LIST_META_CONTEXT: u32 = 9;
const OPT_SET_META_CONTEXT: u32 = 10;
const OPT_EXTENDED_HEADERS: u32 = 11;

const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;

const INFO_EXPORT: u16 = 0;
const INFO_NAME: u16 = 1;
const INFO_DESCRIPTION: u16 = 2;
const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags (NBD_FLAG_*).
pub mod flags {
    /// The other flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// The export cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// NBD_CMD_FLUSH.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// NBD_CMD_FLAG_FUA.
    pub const SEND_FUA: u16 = 1 << 3;
    /// NBD_CMD_TRIM.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// NBD_CMD_WRITE_ZEROES.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// NBD_CMD_FLAG_DF; needs structured replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// NBD_CMD_CACHE.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// NBD_CMD_FLAG_FAST_ZERO.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// What the server sends first.
pub const GREETING: [u8; 18] = greeting();

const fn greeting() -> [u8; 18] {
    let mut bytes = [0; 18];
    let magics = [INIT_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()];
    let mut i = 0;
    while i < 16 {
        bytes[i] = magics[i / 8][i % 8];
        i += 1;
    }
    bytes[17] = (FIXED_NEWSTYLE | NO_ZEROES) as u8;
    bytes
}

/// A metadata context, by the number that replies name it with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context(pub u32);

/// `base:allocation`: where an export has data.
pub const BASE_ALLOCATION: Context = Context(0);
/// `qemu:allocation-depth`: which image of a chain has the data.
pub const DEPTH: Context = Context(1);

/// `qemu:dirty-bitmap:NAME` for each bitmap of an export: what has changed since some moment.
const BITMAP: &str = "qemu:dirty-bitmap:";
const FIRST_BITMAP: u32 = 2;

const CONTEXTS: [(&str, Context); FIRST_BITMAP as usize] = [
    ("base:allocation", BASE_ALLOCATION),
    ("qemu:allocation-depth", DEPTH),
];

/// Queries that list everything that begins with them.
const NAMESPACES: [&str; 3] = ["base:", "qemu:", BITMAP];

impl Context {
    /// The context of one of the [bitmaps of an export](ExportInfo::bitmaps).
    pub fn of_bitmap(index: usize) -> Self {
        Self(FIRST_BITMAP + index as u32)
    }

    /// Which of the bitmaps of its export it shows, if it shows one.
    pub fn bitmap(self) -> Option<usize> {
        self.0.checked_sub(FIRST_BITMAP).map(|index| index as usize)
    }
}

/// Sizes in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// The unit of requests.
    pub minimum: u32,
    /// The unit that is fastest.
    pub preferred: u32,
    /// The longest payload.
    pub maximum: u32,
}

/// What a client is told of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name that clients use.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// Transmission [flags].
    pub flags: u16,
    /// Units of requests.
    pub blocks: BlockSizes,
    /// Names of the dirty bitmaps that clients may query.
    pub bitmaps: Vec<String>,
}

impl ExportInfo {
    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.flags & flags::READ_ONLY != 0
    }

    fn flags(&self, mode: Mode) -> u16 {
        match mode {
            Mode::Simple => self.flags & !flags::SEND_DF,
            _ => self.flags | flags::SEND_DF,
        }
    }
}

/// The exports of a server.
pub trait Exports {
    /// The first export in an order of the server's, or the next one after the export with this key, whether or not that
    /// still exists.
    fn next(&self, after: Option<&str>) -> Option<ListedExport>;
    /// The export of this name, which is the default one if the name is empty.
    fn find(&self, name: &str) -> Option<ExportInfo>;
}

/// An export in the list of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedExport {
    /// Its place in the list.
    pub key: String,
    /// Its name.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
}

/// The client is disconnected.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HandshakeError {
    /// The client's flags are unknown, or it knows only the oldest handshake.
    #[error("the client's flags are {0:#x}, which are not known")]
    Flags(u32),
    /// An option does not begin as options do.
    #[error("an option begins with {0:#018x}, which is not the magic number of one")]
    Magic(u64),
    /// An option is far too long.
    #[error("an option has {0} bytes of data")]
    TooLong(u32),
    /// The client negotiates without end.
    #[error("the client has sent more than {0} options")]
    TooMany(usize),
    /// The client sends without end.
    #[error("the client has sent more than {0} bytes of options")]
    TooMuch(u64),
    /// NBD_OPT_EXPORT_NAME has no reply for errors.
    #[error(
        "the client asked for export '{0}' in a way that cannot be answered with an error: {1}"
    )]
    NoExport(String, &'static str),
}

/// Whether clients must use TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    /// There is none.
    #[default]
    Off,
    /// Nothing else is negotiated before it.
    Required,
    /// It protects the connection.
    On,
}

/// What comes next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Send what was appended, and call again with more bytes.
    Continue,
    /// Send what was appended, and call again with the same bytes: the reply goes on.
    More,
    /// Send what was appended, begin TLS, and continue with [`Handshake::protected`].
    StartTls,
    /// Send what was appended. The transmission phase begins.
    Ready(Box<Negotiated>),
    /// Send what was appended, and end the connection: the client wants that.
    End,
}

/// The result of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The export.
    pub export: ExportInfo,
    /// The form of requests and replies.
    pub mode: Mode,
    /// For NBD_CMD_BLOCK_STATUS.
    pub contexts: Vec<Context>,
}

/// The state of a handshake after the [greeting](GREETING) was sent.
#[derive(Debug, Default)]
pub struct Handshake {
    has_client_flags: bool,
    is_fixed: bool,
    no_zeroes: bool,
    /// Options that have arrived, and their bytes.
    options: usize,
    bytes: u64,
    /// Bytes to skip before the next option.
    skip: usize,
    mode: Mode,
    tls: Tls,
    /// The list of exports is being sent, up to the export with this key.
    listed: Option<Option<String>>,
    /// Contexts that were chosen, and the name of their export.
    chosen: Option<(String, Vec<Context>)>,
}

/// An option's reply of an error type, with a message for people.
struct OptionError(u32, &'static str);

impl OptionError {
    const UNSUPPORTED: Self = Self(1 | 1 << 31, "this option is not supported");
    const NO_TLS: Self = Self(2 | 1 << 31, "this server has no TLS");
    const TLS_REQUIRED: Self = Self(5 | 1 << 31, "this server requires TLS");
    const NO_EXPORT: Self = Self(6 | 1 << 31, "there is no export of this name");
    const TOO_BIG: Self = Self(9 | 1 << 31, "the option is too long");

    const fn invalid(message: &'static str) -> Self {
        Self(3 | 1 << 31, message)
    }
}

impl Handshake {
    /// The beginning of a handshake.
    pub fn new(tls: Tls) -> Self {
        let start = Self::default();
        Self { tls, ..start }
    }

    /// What follows [`Step::StartTls`]. Nothing that was negotiated before is used, because an attacker may have sent it.
    pub fn protected(self) -> Self {
        Self {
            has_client_flags: self.has_client_flags,
            is_fixed: self.is_fixed,
            no_zeroes: self.no_zeroes,
            tls: Tls::On,
            ..Self::default()
        }
    }

    /// Handles the next message in `input`, and appends the reply to `out`. Returns the number of bytes that it took, which
    /// is 0 if more are needed; [`OPTION_BYTES_MAX`] and 16 are always enough.
    ///
    /// # Errors
    /// The client must be disconnected.
    pub fn advance(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, Step), HandshakeError> {
        if self.skip > 0 {
            let skipped = self.skip.min(input.len());
            self.skip -= skipped;
            return Ok((skipped, Step::Continue));
        }
        if let Some(listed) = self.listed.take() {
            self.list(listed, exports, out);
            return Ok((0, Step::More));
        }
        let mut fields = Fields::new(input);
        if !self.has_client_flags {
            let Some(flags) = fields.u32() else {
                return Ok((0, Step::Continue));
            };
            self.set_client_flags(flags)?;
            return Ok((4, Step::Continue));
        }
        let Some(magic) = fields.u64() else {
            return Ok((0, Step::Continue));
        };
        if magic != OPTION_MAGIC {
            return Err(HandshakeError::Magic(magic));
        }
        let (Some(option), Some(len)) = (fields.u32(), fields.u32()) else {
            return Ok((0, Step::Continue));
        };
        if len as usize > OPTION_BYTES_MAX {
            self.count(len)?;
            if len > SKIP_BYTES_MAX || option == OPT_EXPORT_NAME {
                return Err(HandshakeError::TooLong(len));
            }
            self.skip = len as usize;
            let OptionError(kind, message) = OptionError::TOO_BIG;
            reply(option, kind, message.as_bytes(), out);
            return Ok((16, Step::Continue));
        }
        let Some(data) = fields.bytes(len as usize) else {
            return Ok((0, Step::Continue));
        };
        self.count(len)?;
        let step = self.option(option, data, exports, out)?;
        Ok((16 + data.len(), step))
    }

    /// Whether the next message in `input` has arrived and asks to use an export: [`advance`](Self::advance) ends the handshake
    /// if there is such an export.
    pub fn asks_to_begin(&self, input: &[u8]) -> bool {
        let mut fields = Fields::new(input);
        let mut next = || {
            let _magic = fields.u64()?;
            let (option, len) = (fields.u32()?, fields.u32()?);
            fields.bytes(len as usize)?;
            Some(option)
        };
        let is_option = self.has_client_flags && self.skip == 0 && self.listed.is_none();
        is_option && matches!(next(), Some(OPT_EXPORT_NAME | OPT_GO))
    }

    /// Counts an option with so many bytes of data.
    fn count(&mut self, len: u32) -> Result<(), HandshakeError> {
        self.options += 1;
        self.bytes += 16 + u64::from(len);
        let (options, bytes) = match self.tls {
            Tls::Required => (OPTIONS_BEFORE_TLS_MAX, BYTES_BEFORE_TLS_MAX),
            Tls::Off | Tls::On => (OPTIONS_MAX, BYTES_MAX),
        };
        if self.options > options {
            return Err(HandshakeError::TooMany(options));
        }
        if self.bytes > bytes {
            return Err(HandshakeError::TooMuch(bytes));
        }
        Ok(())
    }

    fn set_client_flags(&mut self, flags: u32) -> Result<(), HandshakeError> {
        let known = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
        if flags & !known != 0 {
            return Err(HandshakeError::Flags(flags));
        }
        self.has_client_flags = true;
        self.is_fixed = flags & u32::from(FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
        Ok(())
    }

    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        if option == OPT_EXPORT_NAME {
            return self.export_name(data, exports, out);
        }
        if !self.is_fixed {
            // This client cannot parse replies to options.
            return Err(HandshakeError::Flags(0));
        }
        let handled = match option {
            OPT_ABORT => {
                reply(option, REP_ACK, &[], out);
                return Ok(Step::End);
            }
            OPT_STARTTLS => self.start_tls(data),
            _ if self.tls == Tls::Required => Err(OptionError::TLS_REQUIRED),
            OPT_LIST if data.is_empty() => {
                self.listed = Some(None);
                return Ok(Step::More);
            }
            OPT_LIST => Err(OptionError::invalid("this option has no data")),
            OPT_INFO | OPT_GO => self.info(option, data, exports, out),
            OPT_STRUCTURED_REPLY => self.set_mode(data, Mode::Structured),
            OPT_EXTENDED_HEADERS => self.set_mode(data, Mode::Extended),
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => {
                self.contexts(option, data, exports, out)
            }
            _ => Err(OptionError::UNSUPPORTED),
        };
        match handled {
            Ok(step) => {
                reply(option, REP_ACK, &[], out);
                Ok(step)
            }
            Err(OptionError(kind, message)) => {
                reply(option, kind, message.as_bytes(), out);
                Ok(Step::Continue)
            }
        }
    }

    /// Appends a part of the list of exports: those after the one with this key.
    fn list(&mut self, mut after: Option<String>, exports: &dyn Exports, out: &mut Vec<u8>) {
        let end = out.len() + LIST_BYTES;
        while out.len() < end {
            let Some(export) = exports.next(after.as_deref()) else {
                return reply(OPT_LIST, REP_ACK, &[], out);
            };
            let ListedExport {
                key,
                name,
                description,
            } = export;
            let len = (name.len() as u32).to_be_bytes();
            let data = [&len, name.as_bytes(), description.as_bytes()].concat();
            reply(OPT_LIST, REP_SERVER, &data, out);
            after = Some(key);
        }
        self.listed = Some(after);
    }

    fn start_tls(&self, data: &[u8]) -> Result<Step, OptionError> {
        match self.tls {
            Tls::Off => Err(OptionError::NO_TLS),
            Tls::On => Err(OptionError::invalid("TLS protects this connection already")),
            Tls::Required if data.is_empty() => Ok(Step::StartTls),
            Tls::Required => Err(OptionError::invalid("this option has no data")),
        }
    }

    fn set_mode(&mut self, data: &[u8], mode: Mode) -> Result<Step, OptionError> {
        if !data.is_empty() {
            return Err(OptionError::invalid("this option has no data"));
        }
        if self.mode > mode {
            return Err(OptionError(
                10 | 1 << 31,
                "extended headers were negotiated already",
            ));
        }
        if self.mode == mode {
            return Err(OptionError::invalid("this was negotiated already"));
        }
        self.mode = mode;
        Ok(Step::Continue)
    }

    fn negotiated(&mut self, export: ExportInfo) -> Box<Negotiated> {
        let contexts = match self.chosen.take() {
            Some((name, contexts)) if name == export.name => contexts,
            _ => Vec::new(),
        };
        Box::new(Negotiated {
            export,
            mode: self.mode,
            contexts,
        })
    }

    fn export_name(
        &mut self,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        let name = String::from_utf8_lossy(data);
        let fail = |why| HandshakeError::NoExport(name.chars().take(80).collect(), why);
        if self.tls == Tls::Required {
            return Err(fail(OptionError::TLS_REQUIRED.1));
        }
        if self.mode == Mode::Extended {
            return Err(fail("with extended headers, NBD_OPT_GO is used"));
        }
        let export = exports
            .find(&name)
            .ok_or_else(|| fail(OptionError::NO_EXPORT.1))?;
        out.extend_from_slice(&export.size.to_be_bytes());
        out.extend_from_slice(&export.flags(self.mode).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Ok(Step::Ready(self.negotiated(export)))
    }

    fn info(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Step, OptionError> {
        const MALFORMED: OptionError = OptionError::invalid("the option is malformed");
        let mut fields = Fields::new(data);
        let name = name(&mut fields)?;
        let count = fields.u16().ok_or(MALFORMED)?;
        let mut wanted = Vec::with_capacity(usize::from(count).min(data.len()));
        for _ in 0..count {
            wanted.push(fields.u16().ok_or(MALFORMED)?);
        }
        if !fields.is_empty() {
            return Err(MALFORMED);
        }
        let export = exports.find(name).ok_or(OptionError::NO_EXPORT)?;
        let info = |kind: u16, parts: &[&[u8]], out: &mut Vec<u8>| {
            let data = [&[&kind.to_be_bytes()[..]], parts].concat().concat();
            reply(option, REP_INFO, &data, out);
        };
        if wanted.contains(&INFO_NAME) {
            info(INFO_NAME, &[export.name.as_bytes()], out);
        }
        if wanted.contains(&INFO_DESCRIPTION) && !export.description.is_empty() {
            info(INFO_DESCRIPTION, &[export.description.as_bytes()], out);
        }
        let BlockSizes {
            minimum,
            preferred,
            maximum,
        } = export.blocks;
        let sizes = [minimum, preferred, maximum].map(u32::to_be_bytes).concat();
        info(INFO_BLOCK_SIZE, &[&sizes], out);
        let flags = export.flags(self.mode).to_be_bytes();
        info(INFO_EXPORT, &[&export.size.to_be_bytes(), &flags], out);
        Ok(match option {
            OPT_GO => Step::Ready(self.negotiated(export)),
            _ => Step::Continue,
        })
    }

    fn contexts(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Step, OptionError> {
        const MALFORMED: OptionError = OptionError::invalid("the option is malformed");
        let sets = option == OPT_SET_META_CONTEXT;
        if sets {
            self.chosen = None;
        }
        if self.mode == Mode::Simple {
            return Err(OptionError::invalid("structured replies come first"));
        }
        let mut fields = Fields::new(data);
        let export = name(&mut fields)?;
        let count = fields.u32().ok_or(MALFORMED)?;
        if count > QUERIES_MAX {
            return Err(OptionError::TOO_BIG);
        }
        let mut queries = Vec::new();
        for _ in 0..count {
            queries.push(name(&mut fields)?);
        }
        if !fields.is_empty() {
            return Err(MALFORMED);
        }
        let export = exports.find(export).ok_or(OptionError::NO_EXPORT)?;
        let matches = |context: &str, query: &str| {
            let is_listed = !sets && NAMESPACES.contains(&query) && context.starts_with(query);
            context == query || is_listed
        };
        let named = |(name, number): (&str, Context)| (name.to_owned(), number);
        let bitmaps = (export.bitmaps.iter().enumerate())
            .map(|(index, name)| (format!("{BITMAP}{name}"), Context::of_bitmap(index)));
        let mut chosen = Vec::new();
        for (context, number) in CONTEXTS.into_iter().map(named).chain(bitmaps) {
            let lists_all = !sets && queries.is_empty();
            if lists_all || queries.iter().any(|query| matches(&context, query)) {
                chosen.push(number);
                let number = if sets { number.0 } else { 0 };
                let data = [&number.to_be_bytes()[..], context.as_bytes()].concat();
                reply(option, REP_META_CONTEXT, &data, out);
            }
        }
        if sets {
            self.chosen = Some((export.name, chosen));
        }
        Ok(Step::Continue)
    }
}

/// A length and so many bytes of text.
fn name<'a>(fields: &mut Fields<'a>) -> Result<&'a str, OptionError> {
    let len = fields
        .u32()
        .ok_or(OptionError::invalid("the option is malformed"))?;
    if len as usize > NAME_BYTES_MAX {
        return Err(OptionError::invalid("a name is longer than 4096 bytes"));
    }
    let bytes = fields.bytes(len as usize);
    bytes
        .and_then(|bytes| std::str::from_utf8(bytes).ok())
        .ok_or(OptionError::invalid("a name is incomplete or not UTF-8"))
}

fn reply(option: u32, kind: u32, data: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}
