//! Where the time of a request's place goes.

use super::super::measurement::{Measurement, REQUESTS_MIN};

/// A part of the time of a request's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The guest has not sent the next request.
    Unsent,
    /// Between the guest and the server.
    Transport,
    /// Waiting for a limit.
    Limit,
    /// In tables and clusters of the image.
    Image,
    /// In the engine of the server, and the storage.
    Engine,
    /// From the completion to the guest's ring.
    Back,
    /// In QEMU, whose stages are not measured.
    Qemu,
    /// In the block device.
    Device,
}

/// The parts of the time of a request's place, which add up to 1; `None` if no requests were measured.
pub fn parts(measured: &Measurement) -> Option<Vec<(Part, f64)>> {
    let (requests, guest) = (measured.requests.as_ref(), measured.guest.as_ref());
    let per_s = requests
        .map(|its| its.per_s)
        .or(guest.map(|its| its.per_s))?;
    if per_s * measured.seconds < REQUESTS_MIN {
        return Some(vec![(Part::Unsent, 1.0)]);
    }
    let disks = requests
        .map_or(0, |its| its.disks)
        .max(guest.map_or(0, |its| its.disks));
    let each_ns = 1e9 * f64::from(disks.max(1)) / per_s;
    let of_server = requests.filter(|its| its.stages.is_some());
    let in_server_ns = of_server.map_or(0.0, |its| its.mean_ns);
    let latency_ns = match (guest, requests) {
        (Some(guest), _) => guest.mean_ns.max(in_server_ns),
        (None, Some(requests)) => requests.mean_ns,
        (None, None) => return None,
    };
    let whole_ns = each_ns.max(latency_ns);
    let mut parts = vec![(Part::Unsent, whole_ns - latency_ns)];
    match of_server.and_then(|its| its.stages) {
        Some(stages) => parts.extend([
            (Part::Transport, latency_ns - in_server_ns),
            (Part::Limit, stages.limit_ns),
            (Part::Image, stages.image_ns),
            (Part::Engine, stages.engine_ns),
            (Part::Back, stages.back_ns),
        ]),
        None => {
            // Requests that were merged, or that a cache answered, take no time in the device.
            let device = measured
                .devices
                .iter()
                .max_by(|a, b| a.busy.total_cmp(&b.busy));
            let in_device = device.map_or(0.0, |its| its.mean_ns * (its.per_s / per_s).min(1.0));
            let in_device = in_device.min(latency_ns);
            parts.extend([
                (Part::Device, in_device),
                (Part::Qemu, latency_ns - in_device),
            ]);
        }
    }
    let share = |(part, ns): (Part, f64)| (part, (ns / whole_ns).max(0.0));
    Some(
        parts
            .into_iter()
            .map(share)
            .filter(|(_, share)| *share > 0.0)
            .collect(),
    )
}
