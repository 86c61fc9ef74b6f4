//! A disk as the control socket shows it.

use block::ThrottleLimits;
use serde_json::{Map, Value, json};

use crate::host::Look;
use crate::limits;

/// Everything about a disk, with what it has done.
pub fn disk(look: &Look<'_>) -> Value {
    let (node, spec) = (look.node, &look.node.spec);
    let mut disk = json!({
        "name": node.name(),
        "file": node.filename,
        "format": node.format.to_string(),
        "size": look.size(),
        "readonly": spec.read_only,
        "cache": spec.cache.word(),
        "aio": node.choice.as_ref().map(|choice| choice.aio.word()),
        "aio-reason": node.choice.as_ref().map(|choice| &choice.reason),
        "discard": spec.discard.word(),
        "detect-zeroes": spec.detect_zeroes.word(),
        "limits": limits_of(look.limits),
        "throttle-group": look.group,
    });
    if let Some(export) = look.export {
        let threads = &export.device.threads;
        disk["export"] = export.id.clone().into();
        disk["socket"] = export.socket.display().to_string().into();
        disk["connected"] = export.connected().into();
        disk["queues"] = threads.len().into();
        disk["queue-size"] = export.device.queue_size.into();
        disk["write-cache"] = export.disk.write_cache().into();
        disk["readonly"] = export.disk.facts.read_only.into();
        disk["iothreads"] = threads.iter().map(|t| t.id.clone()).collect();
    }
    disk
}

fn limits_of(limits: &ThrottleLimits) -> Map<String, Value> {
    let pairs = limits::pairs(limits).into_iter();
    pairs.map(|(key, n)| (key.to_owned(), n.into())).collect()
}
