//! Commands and objects that set I/O limits.

use block::ThrottleLimits;
use serde_json::{Map, Value};

use crate::CommandError;
use crate::limits::{COMMAND, FLAT_PROPERTY, PROPERTY, limit_members, put_limits, take_limits};
use crate::qapi::{Fields, Member, Object, Qapi, Record, Schema};

/// Arguments of `block_set_io_throttle` (`BlockIOThrottle`). All six rates are mandatory; absent optional members mean
/// no limit.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSetIoThrottle {
    /// The disk, by the name of its node or its export. Either this or `id` is given.
    pub device: Option<String>,
    /// The disk, by the id of its export.
    pub id: Option<String>,
    /// The new limits, which have been checked for contradictions.
    pub limits: ThrottleLimits,
    /// The throttle group to join; a group of its own if absent.
    pub group: Option<String>,
}

impl Record for BlockSetIoThrottle {
    const NAME: &'static str = "BlockIOThrottle";

    fn object(schema: &mut Schema) -> Object {
        let mut members = vec![
            schema.member::<Option<String>>("device"),
            schema.member::<Option<String>>("id"),
        ];
        members.extend(limit_members(schema, COMMAND, true));
        members.push(schema.member::<Option<String>>("group"));
        Object {
            members,
            variants: None,
        }
    }

    fn take_members(fields: &mut Fields<'_>) -> Result<Self, CommandError> {
        let limits = take_limits(fields, COMMAND, true)?.0;
        limits.check()?;
        let throttle = Self {
            device: fields.take_optional("device")?,
            id: fields.take_optional("id")?,
            limits,
            group: fields.take_optional("group")?,
        };
        if throttle.device.is_some() == throttle.id.is_some() {
            return Err(CommandError::generic(
                "Need exactly one of 'device' and 'id'",
            ));
        }
        Ok(throttle)
    }

    fn put_members(&self, map: &mut Map<String, Value>) {
        Member::put(&self.device, "device", map);
        Member::put(&self.id, "id", map);
        put_limits(&self.limits, COMMAND, map);
        Member::put(&self.group, "group", map);
    }
}

/// `ThrottleGroupProperties`: `limits`, or the same values as flat properties (`x-iops-total` and so on).
#[derive(Clone, Debug, PartialEq)]
pub struct ThrottleGroupProperties {
    /// The group's limits, which have been checked for contradictions.
    pub limits: ThrottleLimits,
}

impl Record for ThrottleGroupProperties {
    const NAME: &'static str = "ThrottleGroupProperties";

    fn object(schema: &mut Schema) -> Object {
        let mut members = vec![schema.member::<Option<LimitsProperty>>("limits")];
        for mut member in limit_members(schema, FLAT_PROPERTY, false) {
            member["features"] = vec!["unstable"].into();
            members.push(member);
        }
        Object {
            members,
            variants: None,
        }
    }

    fn take_members(fields: &mut Fields<'_>) -> Result<Self, CommandError> {
        let whole: Option<LimitsProperty> = fields.take_optional("limits")?;
        let (flat, any) = take_limits(fields, FLAT_PROPERTY, false)?;
        let limits = match whole {
            Some(_) if any => {
                let problem = "'limits' and x- properties exclude each other; leave the latter out";
                return Err(CommandError::generic(problem));
            }
            Some(LimitsProperty(limits)) => limits,
            None => flat,
        };
        limits.check()?;
        Ok(Self { limits })
    }

    fn put_members(&self, map: &mut Map<String, Value>) {
        map.insert("limits".into(), LimitsProperty(self.limits).to_json());
    }
}

/// `ThrottleLimits`
struct LimitsProperty(ThrottleLimits);

impl Record for LimitsProperty {
    const NAME: &'static str = "ThrottleLimits";

    fn object(schema: &mut Schema) -> Object {
        Object {
            members: limit_members(schema, PROPERTY, false),
            variants: None,
        }
    }

    fn take_members(fields: &mut Fields<'_>) -> Result<Self, CommandError> {
        Ok(Self(take_limits(fields, PROPERTY, false)?.0))
    }

    fn put_members(&self, map: &mut Map<String, Value>) {
        put_limits(&self.0, PROPERTY, map);
    }
}
