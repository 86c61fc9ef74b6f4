//! `block::ThrottleLimits` in the two spellings of QMP: `bps_rd_max_length` of commands and replies, and
//! `bps-read-max-length` of objects.

use block::{Rate, ThrottleLimits};
use serde_json::{Map, Value};

use crate::CommandError;
use crate::qapi::{Fields, Schema};

/// The spelling of the members that hold limits.
#[derive(Clone, Copy)]
pub(crate) struct Spelling {
    prefix: &'static str,
    /// The names of the six rates, in the order of `rates_mut`.
    rates: [&'static str; 6],
    separator: char,
}

/// The spelling in commands and replies.
pub(crate) const COMMAND: Spelling = Spelling {
    prefix: "",
    rates: ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"],
    separator: '_',
};

/// The spelling in the `limits` of an object.
pub(crate) const PROPERTY: Spelling = Spelling {
    prefix: "",
    rates: [
        "bps-total",
        "bps-read",
        "bps-write",
        "iops-total",
        "iops-read",
        "iops-write",
    ],
    separator: '-',
};

/// The spelling as properties of the object itself.
pub(crate) const FLAT_PROPERTY: Spelling = Spelling {
    prefix: "x-",
    ..PROPERTY
};

impl Spelling {
    fn average(self, rate: usize) -> String {
        format!("{}{}", self.prefix, self.rates[rate])
    }

    fn max(self, rate: usize) -> String {
        format!("{}{}max", self.average(rate), self.separator)
    }

    fn max_length(self, rate: usize) -> String {
        let separator = self.separator;
        format!("{}{separator}length", self.max(rate))
    }

    fn iops_size(self) -> String {
        format!("{}iops{}size", self.prefix, self.separator)
    }
}

/// Describes the members that hold limits; those for the averages may be `required`.
pub(crate) fn limit_members(schema: &mut Schema, spelling: Spelling, required: bool) -> Vec<Value> {
    let mut members = Vec::new();
    for rate in 0..spelling.rates.len() {
        let name = spelling.average(rate);
        members.push(if required {
            schema.member::<u64>(&name)
        } else {
            schema.member::<Option<u64>>(&name)
        });
        members.push(schema.member::<Option<u64>>(&spelling.max(rate)));
        members.push(schema.member::<Option<u64>>(&spelling.max_length(rate)));
    }
    members.push(schema.member::<Option<u64>>(&spelling.iops_size()));
    members
}

/// Takes the limits. An absent member means no limit. Also returns whether any member was present.
pub(crate) fn take_limits(
    fields: &mut Fields<'_>,
    spelling: Spelling,
    required: bool,
) -> Result<(ThrottleLimits, bool), CommandError> {
    let mut limits = ThrottleLimits::NONE;
    let mut any = false;
    for (index, rate) in rates_mut(&mut limits).into_iter().enumerate() {
        let name = spelling.average(index);
        let average = if required {
            Some(fields.take_required(&name)?)
        } else {
            fields.take_optional(&name)?
        };
        let max = fields.take_optional(&spelling.max(index))?;
        let name = spelling.max_length(index);
        let max_length = fields.take_optional(&name)?;
        if max_length == Some(0) {
            let problem = format!("Parameter '{name}': a burst lasts at least a second");
            return Err(CommandError::generic(problem));
        }
        any |= average.or(max).or(max_length).is_some();
        *rate = Rate {
            average: average.unwrap_or(rate.average),
            max: max.unwrap_or(rate.max),
            max_length: max_length.unwrap_or(rate.max_length),
        };
    }
    let iops_size = fields.take_optional(&spelling.iops_size())?;
    any |= iops_size.is_some();
    limits.iops_size = iops_size.unwrap_or(limits.iops_size);
    Ok((limits, any))
}

/// Writes the limits. Members for bursts are written only if a burst is set, as in QEMU's replies.
pub(crate) fn put_limits(
    limits: &ThrottleLimits,
    spelling: Spelling,
    map: &mut Map<String, Value>,
) {
    let mut copy = *limits;
    for (index, rate) in rates_mut(&mut copy).into_iter().enumerate() {
        map.insert(spelling.average(index), rate.average.into());
        if rate.max > 0 {
            map.insert(spelling.max(index), rate.max.into());
            map.insert(spelling.max_length(index), rate.max_length.max(1).into());
        }
    }
    if limits.iops_size > 0 {
        map.insert(spelling.iops_size(), limits.iops_size.into());
    }
}

/// The six rates, in the order of `Spelling::rates`.
fn rates_mut(limits: &mut ThrottleLimits) -> [&mut Rate; 6] {
    [
        &mut limits.bps_total,
        &mut limits.bps_read,
        &mut limits.bps_write,
        &mut limits.iops_total,
        &mut limits.iops_read,
        &mut limits.iops_write,
    ]
}
