//! What ringdisk leaves with the lock of an image in a Ceph cluster: `ringdisk`, a token, the process that has it and when that
//! began, and, while it is the token that the record announced, `new`.

use std::fs;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    pub token: String,
    /// Nothing was written to the image since the lock was acquired.
    pub is_new: bool,
    process: u32,
    /// When the process began, in ticks since the host did (field 22 of proc_pid_stat(5)).
    began: u64,
}

impl Mark {
    /// Of this process.
    pub fn new(token: String, is_new: bool) -> Self {
        let process = std::process::id();
        Self {
            token,
            is_new,
            process,
            began: began(process).unwrap_or_default(),
        }
    }

    /// Parses the description of a lock. `None` if it is none of ringdisk's.
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.strip_prefix("ringdisk ")?.split(' ');
        let mark = Self {
            token: words.next()?.to_owned(),
            process: words.next()?.parse().ok()?,
            began: words.next()?.parse().ok()?,
            is_new: match words.next() {
                None => false,
                Some("new") => true,
                Some(_) => return None,
            },
        };
        words.next().is_none().then_some(mark)
    }

    pub fn text(&self) -> String {
        let new = if self.is_new { " new" } else { "" };
        let (token, process, began) = (&self.token, self.process, self.began);
        format!("ringdisk {token} {process} {began}{new}")
    }

    /// The process that left it, if that is on this host and has not ended.
    pub fn living(&self) -> Option<u32> {
        (began(self.process) == Some(self.began)).then_some(self.process)
    }
}

/// When a process began that has not ended, even if its parent has not noticed that.
fn began(process: u32) -> Option<u64> {
    began_in(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

fn began_in(stat: &str) -> Option<u64> {
    // The second field, in parentheses, may contain anything.
    let (_, after) = stat.rsplit_once(") ")?;
    let mut fields = after.split(' ');
    let has_ended = matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| !has_ended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::token;

    #[test]
    fn marks_are_read_as_they_are_written() {
        for is_new in [false, true] {
            let mark = Mark::new(token(), is_new);
            assert_eq!(Mark::parse(&mark.text()), Some(mark));
        }
        for text in [
            "",
            "ringdisk",
            "ringdisk 1",
            "ringdisk 1 2 3 old",
            "ringdisk 1 2 3 new new",
            "librbd 1 2 3",
            "ringdisk 1 -2 3",
        ] {
            assert_eq!(Mark::parse(text), None, "{text}");
        }
    }

    #[test]
    fn processes_that_have_ended_do_not_live() {
        let mark = Mark::new(token(), false);
        assert_eq!(mark.living(), Some(std::process::id()));
        // Its number may have another process now.
        let earlier = Mark {
            began: mark.began + 1,
            ..mark
        };
        assert_eq!(earlier.living(), None);
        let fields = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        let stat = |state| format!("4 (a) S b)) {state} {fields}");
        assert_eq!(began_in(&stat("S")), Some(4711));
        assert_eq!(began_in(&stat("Z")), None);
    }
}
