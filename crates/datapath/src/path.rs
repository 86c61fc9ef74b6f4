//! The path of one I/O. [`Worker::turn`] does one batch at each stage; [`Worker::advance`] takes a request from stage to
//! stage. Both are here, and nothing else calls a stage: a stage works on a request's queue and slot, and
//! [returns](next::Next) what comes next.

pub(crate) mod admit;
pub(crate) mod complete;
pub(crate) mod fail;
pub(crate) mod fetch;
mod intent;
mod map_jobs;
pub(crate) mod mapped;
pub(crate) mod next;
pub(crate) mod notify;
pub(crate) mod plan;
pub(crate) mod preserve;
pub(crate) mod submit;
pub(crate) mod sync;
pub(crate) mod wait;
mod zeroes;

use std::io;
use std::mem;

use block::{Engine, FileOffset, Request, TimeNoted};
use guest::RingError;
use tracing::error;

use crate::clock::now_ns;
use crate::disk::flush_coalescer::SyncEnd;
use crate::queue::held::Verdict;
use crate::queue::slot::RequestState;
use crate::queue::token::Event;
use crate::request::{Ending, RequestId, Retry};
use crate::resources::blocking_pool::{AbortEnd, Job, JobResult};
use crate::worker::{RELEASE_MAX, Worker};
use admit::Admitted;
use fetch::{BATCH, BatchNeeds, CHUNK_INSTANT_MAX, FetchResult, PUBLISH};
use mapped::MappedStage;
use next::{Next, SyncResult};
use plan::Plan;

/// Bytes that a thread zeroes of its guests' memory, or looks for zeroes in, in one turn, so that everything else that it
/// serves waits for no more than that.
const ZEROES_PER_TURN: u64 = 1 << 20;

impl<E: Engine> Worker<E> {
    pub fn run(mut self) {
        loop {
            if self.wake.take() {
                self.handle_commands();
                self.check_syncs();
                self.take_job_results();
                self.retry_copies();
                // What has ended there may have left a buffer.
                self.retry_bounced();
            }
            if !self.control.preceding.is_empty() {
                self.check_preceding();
            }
            if self.control.has_quit {
                if !self.queues.is_empty() {
                    // The engine waits for operations in flight when it is dropped.
                    self.abandon();
                }
                return;
            }
            if let Err(e) = self.turn() {
                // The ring itself fails, not an operation on it: nothing in this thread can continue.
                error!(
                    "I/O thread: the kernel refuses to work on the ring: {e}; front-ends that it serves are \
                     disconnected, and can be served again once ringdisk is restarted"
                );
                return self.abandon();
            }
        }
    }

    /// The path of one I/O, for as many requests as there are at each stage.
    fn turn(&mut self) -> io::Result<()> {
        let fetched = self
            .fetch()
            .max(self.release_held())
            .max(self.continue_zeroing());
        self.notify();
        self.wait(fetched)?;
        self.complete();
        Ok(())
    }

    /// Fetches requests from every active queue and submits their operations.
    fn fetch(&mut self) -> FetchResult {
        let mut result = FetchResult::Nothing;
        let active = &mut self.queues.active;
        // Where there may not be room for all, the first must not always be the same.
        if active.len() > 1 && self.engine.room() < active.len() * CHUNK_INSTANT_MAX {
            active.rotate_left(1);
        }
        // By index: a queue that is retired leaves the list.
        let mut i = 0;
        while i < self.queues.active.len() {
            let number = self.queues.active[i];
            let fetched = self.fetch_queue(number);
            // Also if the ring cannot be trusted: these were fetched before that showed.
            self.start_mapped(number);
            match fetched {
                Ok(fetched) => {
                    result = result.max(fetched);
                    i += 1;
                }
                Err(e) => {
                    self.notify_queue(number);
                    self.queues.deactivate(number);
                    fetch::retire(self.queues.get(number), &e, &self.notifier);
                }
            }
        }
        result
    }

    fn fetch_queue(&mut self, number: usize) -> Result<FetchResult, RingError> {
        let queue = self.queues.get(number);
        let waiting = usize::from(queue.ring.available()?);
        if waiting == 0 {
            return Ok(FetchResult::Nothing);
        }
        let in_flight = queue.slots.taken();
        if in_flight == 0 {
            let disk = self.disks.get(queue.thread_disk);
            self.waiting
                .poller
                .request_arrived(&mut disk.estimator, now_ns);
        }
        let chunk = fetch::chunk_size(waiting, in_flight, self.waiting.is_instant);
        let needs = BatchNeeds::of(queue);
        if needs.is_none() {
            self.fetch_batch::<false>(number, waiting, chunk, needs)
        } else {
            self.fetch_batch_with_needs(number, waiting, chunk, needs)
        }
    }

    #[inline(never)]
    fn fetch_batch_with_needs(
        &mut self,
        number: usize,
        waiting: usize,
        chunk: usize,
        needs: BatchNeeds,
    ) -> Result<FetchResult, RingError> {
        self.fetch_batch::<true>(number, waiting, chunk, needs)
    }

    /// Serves up to `chunk` operations of the requests that wait. Twice in the program, so that where a batch needs nothing
    /// special, nothing of it is looked at for each request.
    #[inline]
    fn fetch_batch<const HAS_NEEDS: bool>(
        &mut self,
        number: usize,
        waiting: usize,
        chunk: usize,
        needs: BatchNeeds,
    ) -> Result<FetchResult, RingError> {
        let needs = if HAS_NEEDS {
            needs
        } else {
            BatchNeeds::default()
        };
        let (mut count, mut submitted, mut noted) = (0, 0, TimeNoted::default());
        while count < waiting.min(BATCH) && submitted < chunk {
            let queue = self.queues.get(number);
            // There is always a slot, unless the ring is larger than the table, or the guest made a descriptor available
            // twice.
            if queue.slots.none_free() || self.engine.room() <= self.fetching.starting.len() {
                break;
            }
            count += 1;
            let scratch = &mut self.fetching.scratch[..queue.ring.max_segments()];
            let chain = queue.ring.fetch(scratch)?;
            let (readable, writable) = fetch::buffers(&chain, scratch);
            let Some(request) = fetch::parse(queue, &chain, readable) else {
                continue;
            };
            let segments = match request {
                Request::Read { .. } => writable,
                _ => readable,
            };
            if HAS_NEEDS {
                match admit::admit(queue, chain.ticket(), request, segments, needs) {
                    Admitted::Yes => {}
                    Admitted::Held => continue,
                    Admitted::HeldFirst => {
                        self.throttling.queues.push(number);
                        continue;
                    }
                }
            }
            let stamps = needs.stamps;
            if HAS_NEEDS && needs.preserves && preserve::is_needed(queue, &request) {
                let at = FileOffset(0);
                let slot = (queue.slots).take(chain.ticket(), request, at, segments, stamps);
                self.preserve(RequestId::new(number, slot));
                submitted += 1;
                continue;
            }
            let (disk, image, bitmaps) = (&queue.disk, &queue.image, &queue.bitmaps);
            match plan::plan(disk, image, bitmaps, request, &mut noted) {
                Plan::Operation(at) => {
                    let slot = (queue.slots).take(chain.ticket(), request, at, segments, stamps);
                    self.submit(RequestId::new(number, slot));
                    submitted += 1;
                    continue;
                }
                Plan::Map => {
                    let at = FileOffset(0);
                    let slot = (queue.slots).take(chain.ticket(), request, at, segments, stamps);
                    self.fetching.starting.push(slot);
                    submitted += 1;
                    continue;
                }
                Plan::Note => {
                    let at = FileOffset(0);
                    let slot = (queue.slots).take(chain.ticket(), request, at, segments, stamps);
                    self.note(RequestId::new(number, slot));
                    submitted += 1;
                    continue;
                }
                Plan::Sync => {
                    let at = FileOffset(0);
                    let slot = (queue.slots).take(chain.ticket(), request, at, segments, stamps);
                    self.sync(RequestId::new(number, slot));
                    submitted += 1;
                    continue;
                }
                Plan::Done(status, written) => {
                    queue.tally.answered(&request, status, stamps);
                    (queue.ring).complete(&chain.ticket(), status as u8, written + 1);
                }
                Plan::Id => fetch::answer_id(queue, &chain, writable),
            }
            if count % PUBLISH == 0 {
                self.notify_queue(number);
            }
        }
        Ok(match count {
            0 => FetchResult::NoRoom,
            n if n < waiting => FetchResult::More,
            _ => FetchResult::All,
        })
    }

    /// Starts the requests to a mapped image that were fetched from a queue.
    #[inline]
    fn start_mapped(&mut self, number: usize) {
        if self.fetching.starting.is_empty() {
            return;
        }
        let mut starting = mem::take(&mut self.fetching.starting);
        mapped::touch(self.queues.get(number), &starting);
        for slot in starting.drain(..) {
            let id = RequestId::new(number, slot);
            match self.mapped(id).map() {
                // Nearly all requests.
                Next::Submit if self.engine.room() > 0 => self.submit(id),
                next => self.advance(id, next),
            }
        }
        self.fetching.starting = starting;
    }

    /// Lets held requests go that may.
    #[inline]
    fn release_held(&mut self) -> FetchResult {
        if self.throttling.queues.is_empty() {
            FetchResult::Nothing
        } else {
            self.release_throttled()
        }
    }

    #[cold]
    fn release_throttled(&mut self) -> FetchResult {
        let now = now_ns();
        let mut again = u64::MAX;
        let mut result = FetchResult::Nothing;
        let mut released = mem::take(&mut self.throttling.released);
        for i in (0..self.throttling.queues.len()).rev() {
            let number = self.throttling.queues[i];
            let room = self.engine.room().min(RELEASE_MAX);
            // A queue that has stopped has no held requests.
            let verdict = match self.queues.find(number) {
                Some(queue) => admit::release(queue, now, room, &mut released),
                None => Verdict::Empty,
            };
            if !released.is_empty() {
                // The guest is likely to follow up at once.
                self.queues.activate(number);
                result = FetchResult::All;
            }
            for slot in released.drain(..) {
                self.start_admitted(RequestId::new(number, slot), now);
            }
            match verdict {
                Verdict::Empty => {
                    self.throttling.queues.swap_remove(i);
                }
                Verdict::NoRoom if room > 0 => result = FetchResult::More,
                // A completion makes room, and wakes.
                Verdict::NoRoom => {}
                Verdict::Until(at) => again = again.min(at),
            }
            if self.queues.find(number).is_some_and(|q| !q.is_running()) {
                self.notify_queue(number);
                self.finish_stop(number);
            }
        }
        self.throttling.released = released;
        if again < u64::MAX {
            self.timer.set(now, again);
        }
        result
    }

    fn start_admitted(&mut self, id: RequestId, now: u64) {
        let queue = self.queues.get(id.queue);
        let s = queue.slots.get(id.slot);
        (s.stamps.admitted, s.stamps.submitted) = (now, now);
        let request = s.request;
        if preserve::is_needed(queue, &request) {
            return self.preserve(id);
        }
        self.plan(id);
    }

    /// Plans a request that has a slot.
    fn plan(&mut self, id: RequestId) {
        let queue = self.queues.get(id.queue);
        let s = queue.slots.get(id.slot);
        let (disk, image, bitmaps) = (&queue.disk, &queue.image, &queue.bitmaps);
        let plan = plan::plan(disk, image, bitmaps, s.request, &mut TimeNoted::default());
        let next = match plan {
            Plan::Operation(at) => {
                (s.at, s.state) = (at, RequestState::Moving);
                Next::Submit
            }
            Plan::Map => Next::Map,
            Plan::Note => return self.note(id),
            Plan::Done(status, written) => {
                return complete::answer(queue, id.slot, status, written);
            }
            Plan::Id | Plan::Sync => unreachable!("neither a limit nor a note applies to these"),
        };
        self.advance(id, next);
    }

    /// Continues requests that read more zeroes than one turn allows, or may write them, of each disk in turn.
    fn continue_zeroing(&mut self) -> FetchResult {
        self.zeroing.budget = ZEROES_PER_TURN;
        while self.zeroing.rotation.waiting > 0 && self.zeroing.budget > 0 {
            let index = self.zeroing.rotation.next_disk(&self.disks);
            // A disk whose last queue has stopped has no requests.
            if let Some(disk) = self.disks.find(index)
                && let Some(id) = disk.zeroing.pop_front()
            {
                self.zeroing.rotation.waiting -= 1;
                let queue = self.queues.get(id.queue);
                let next = match (queue.slots.get(id.slot).state, queue.file) {
                    (RequestState::Preserving, _) => Next::Preserve,
                    (_, Some(_)) => Next::Submit,
                    (_, None) => Next::Map,
                };
                self.advance(id, next);
            }
        }
        match self.zeroing.rotation.waiting {
            0 => FetchResult::Nothing,
            _ => FetchResult::More,
        }
    }

    /// Publishes what was completed this turn. Only active queues can have anything.
    fn notify(&mut self) {
        for i in 0..self.queues.active.len() {
            self.notify_queue(self.queues.active[i]);
        }
    }

    #[inline]
    pub fn notify_queue(&mut self, number: usize) {
        let queue = self.queues.get(number);
        if notify::publish(queue, &self.notifier).is_err() {
            let disk = queue.disk.clone();
            notify::avoid_blocking(&mut self.queues, &disk);
        }
    }

    fn wait(&mut self, fetched: FetchResult) -> io::Result<()> {
        let wait = wait::Wait {
            engine: &mut self.engine,
            queues: &mut self.queues,
            disks: &mut self.disks,
            timer: &mut self.timer,
            wake: &self.wake,
            waiting: &mut self.waiting,
            has_jobs: self.blocking_pool.has_jobs(),
        };
        wait.wait(fetched)
    }

    /// Handles the completions that were reaped.
    fn complete(&mut self) {
        self.waiting.reaped_ns = 0;
        for i in 0..self.waiting.completions.len() {
            let completion = self.waiting.completions[i];
            match Event::from(completion.token) {
                Event::Operation(id) => {
                    let queue = self.queues.get(id.queue);
                    let mut next = complete::operation(queue, id.slot, completion.result);
                    if let Next::PieceMoved = next {
                        next = self.mapped(id).piece_moved();
                    }
                    match next {
                        // Nearly all requests, past the other stages: this saves 60 instructions for each.
                        Next::Moved if !sync::is_needed(self.queues.get(id.queue), id.slot) => {
                            self.finish(id, Ending::OK);
                        }
                        next => self.advance(id, next),
                    }
                }
                Event::Kick { queue } => {
                    // A kick may be reaped in the same batch as the end of the queue's last request.
                    if self.queues.find(queue).is_some() {
                        self.queues.activate(queue);
                    }
                }
                // `run` looks at the commands.
                Event::Wake => {}
                Event::Timer => self.handle_timer(),
            }
        }
        self.retry_bounced();
        if mem::take(&mut self.is_sync_postponed) {
            self.check_syncs();
        }
        self.waiting.reaped_ns = 0;
    }

    /// Takes a request from stage to stage, until it has ended or something else takes it further.
    pub fn advance(&mut self, id: RequestId, mut next: Next) {
        loop {
            let queue = self.queues.get(id.queue);
            let index = queue.thread_disk;
            next = match next {
                Next::InProgress => return,
                Next::Preserve => self.preserve_next(id),
                Next::OldDataRead(result) => {
                    let disk = self.disks.get(index);
                    preserve::read_ended(queue, id.slot, disk, result)
                }
                Next::WaitForCopy => {
                    self.release_bounce(id);
                    self.waiting_for_copy.push(id);
                    return;
                }
                Next::Plan => return self.plan_preserved(id),
                Next::Map => self.mapped(id).map(),
                // Completions that were handled before in this batch may have taken the room of this one.
                Next::Submit if self.engine.room() == 0 => Next::WaitForBuffer,
                Next::Submit => return self.submit(id),
                Next::WaitForBuffer => {
                    let waiting = &mut self.disks.get(index).waiting_for_buffer;
                    // One that has a buffer waits for room in the engine only, and gives the buffer back.
                    if queue.slots.get(id.slot).bounce.is_some() {
                        waiting.push_front(id);
                    } else {
                        waiting.push_back(id);
                    }
                    self.waiting_for_buffer.waiting += 1;
                    return;
                }
                Next::WaitForTurn => {
                    self.disks.get(index).zeroing.push_back(id);
                    self.zeroing.rotation.waiting += 1;
                    return;
                }
                Next::StartJob(job) => return self.start_job(id, job),
                Next::PieceMoved => self.mapped(id).piece_moved(),
                Next::Moved if sync::is_needed(queue, id.slot) => Next::Sync,
                Next::Moved => Next::Finish(Ending::OK),
                Next::Sync => return self.sync(id),
                Next::Synced(result) => return self.end_sync(index, result),
                Next::Fail {
                    errno,
                    retry: Retry::Operation,
                } if queue.file.is_none() && block::is_no_space(errno) => {
                    self.release_bounce(id);
                    self.mapped(id).make_space(errno)
                }
                Next::Fail { errno, retry } => {
                    let disk = self.disks.get(index);
                    match fail::stall(queue, id, disk, &mut self.timer, errno, retry) {
                        Some(ending) => Next::Finish(ending),
                        None => return self.stalled(id),
                    }
                }
                Next::Finish(ending) => return self.finish(id, ending),
                Next::Leave => {
                    self.leave(id);
                    return self.finish_stop(id.queue);
                }
            }
        }
    }

    /// Gives back the bounce buffer that a request has, if any.
    fn release_bounce(&mut self, id: RequestId) {
        let queue = self.queues.get(id.queue);
        submit::release_bounce(
            queue.slots.get(id.slot),
            queue.thread_disk,
            &mut self.disks,
            &mut self.buffers.bounce,
        );
    }

    /// What the mapped stage needs for a request.
    #[inline(always)]
    pub fn mapped(&mut self, id: RequestId) -> MappedStage<'_> {
        let queue = self.queues.get(id.queue);
        let disk = self.disks.get(queue.thread_disk);
        let (budget, cow) = (&mut self.zeroing.budget, &mut self.buffers.cow);
        MappedStage::new(queue, id.slot, disk, budget, cow)
    }

    /// Submits the operation that a request needs next. The engine has room for it.
    #[inline]
    fn submit(&mut self, id: RequestId) {
        let next = submit::submit(
            &mut self.engine,
            id,
            self.queues.get(id.queue),
            &mut self.disks,
            &mut self.buffers.bounce,
            &mut self.zeroing.budget,
        );
        if !matches!(next, Next::InProgress) {
            self.advance(id, next);
        }
    }

    /// Submits requests for which there are buffers now, from each disk in turn.
    fn retry_bounced(&mut self) {
        let mut refused = 0;
        while self.waiting_for_buffer.waiting > 0
            && self.engine.room() > 0
            && refused < self.disks.len()
        {
            let index = self.waiting_for_buffer.next_disk(&self.disks);
            // A disk whose last queue has stopped has no requests.
            if let Some(disk) = self.disks.find(index)
                && let Some(&id) = disk.waiting_for_buffer.front()
                && (self.buffers.bounce.has_one(disk.bounces)
                    || (self.queues.get(id.queue).slots.get(id.slot).bounce).is_some())
            {
                disk.waiting_for_buffer.pop_front();
                self.waiting_for_buffer.waiting -= 1;
                self.submit(id);
                refused = 0;
            } else {
                refused += 1;
            }
        }
    }

    /// Has the blocking pool do something for a request.
    fn start_job(&mut self, id: RequestId, job: Job) {
        let queue = self.queues.get(id.queue);
        let wake = self.blocking_pool.waker(id);
        let job = mapped::wait_in_job(queue.image.clone(), wake, job);
        self.blocking_pool.start(queue.thread_disk, id, job);
    }

    /// Has the range of a request noted.
    #[cold]
    fn note(&mut self, id: RequestId) {
        let job = intent::note(self.queues.get(id.queue), id.slot);
        self.start_job(id, job);
    }

    /// Continues the requests for which the blocking pool has done something.
    fn take_job_results(&mut self) {
        for (id, result) in self.blocking_pool.take_results() {
            if let JobResult::Noted = result {
                self.plan_noted(id);
                continue;
            }
            let queue = self.queues.get(id.queue);
            let next = if queue.slots.get(id.slot).state == RequestState::Preserving {
                let disk = self.disks.get(queue.thread_disk);
                preserve::take_result(queue, id.slot, disk, result)
            } else {
                self.mapped(id).take_result(result)
            };
            self.advance(id, next);
        }
    }

    /// Completes a request once all that has completed by now is durable, this request included.
    fn sync(&mut self, id: RequestId) {
        let queue = self.queues.get(id.queue);
        let index = queue.thread_disk;
        // It needs its buffer no more, and may have to wait for long.
        self.release_bounce(id);
        let queue = self.queues.get(id.queue);
        if sync::join(queue, id, self.disks.get(index)) {
            self.begin_sync(index);
        }
    }

    /// Begins an fdatasync for the requests of a disk that wait for one.
    fn begin_sync(&mut self, index: usize) {
        // The last queue of the disk may have stopped when its last request was served.
        let Some(disk) = self.disks.find(index) else {
            return;
        };
        match sync::begin(disk, self.engine.room(), &self.wake) {
            sync::SyncStart::Nothing => {}
            sync::SyncStart::Postponed => self.is_sync_postponed = true,
            sync::SyncStart::Served(ended) => self.serve_synced(index, ended),
            sync::SyncStart::Lead(id) => {
                let next = sync::lead(self.queues.get(id.queue), id.slot, disk);
                self.advance(id, next);
            }
        }
    }

    /// The fdatasync that this thread has begun for a disk has ended.
    fn end_sync(&mut self, index: usize, result: SyncResult) {
        let ended = sync::end(self.disks.get(index), result);
        self.serve_synced(index, ended);
        self.begin_sync(index);
    }

    /// An fdatasync of another thread may have ended, or there may be room for one.
    fn check_syncs(&mut self) {
        for index in 0..self.disks.len() {
            let Some(disk) = self.disks.find(index) else {
                continue;
            };
            if let Some(ended) = sync::ended_elsewhere(disk) {
                self.serve_synced(index, ended);
                self.begin_sync(index);
            }
        }
    }

    /// Ends the requests that an fdatasync serves.
    fn serve_synced(&mut self, index: usize, ended: SyncEnd) {
        // The last queue of the disk may stop with one of them.
        while let Some(disk) = self.disks.find(index)
            && let Some((id, next)) = sync::next_served(disk, ended)
        {
            self.advance(id, next);
        }
    }

    /// Ends a request: the guest is told of it, once clusters that it took in vain were given back.
    #[inline]
    pub fn finish(&mut self, id: RequestId, ending: Ending) {
        let queue = self.queues.get(id.queue);
        if ending.status != guest::blk::Status::Ok {
            if let Some(job) = mapped::abort(queue, id.slot, AbortEnd::Finish(ending)) {
                // It may have to wait for long.
                self.release_bounce(id);
                return self.start_job(id, job);
            }
            fail::report(&queue.disk, queue.slots.get(id.slot), ending);
        }
        let finished = complete::finish(
            queue,
            id.slot,
            &mut self.disks,
            &mut self.buffers,
            &mut self.waiting.reaped_ns,
            ending.status,
        );
        if finished.was_stalled {
            let disk = self.disks.get(queue.thread_disk);
            fail::stalled_ended(disk, &mut self.timer, ending.status);
        }
        if queue.is_running() {
            // The guest is likely to follow up at once.
            self.queues.activate(id.queue);
        } else {
            self.notify_queue(id.queue);
            self.finish_stop(id.queue);
        }
    }
}
