//! `ringdisk top`: the disks, live.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use datapath::Histogram;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Bar, BarChart, BarGroup, Block, Row, Sparkline, Table, TableState};

use super::rates::{Rates, Sample};
use super::stats::{HEADINGS, cells, count, time};
use super::{CommandLineError, CommandResult, Connection, answer};

/// Samples of a disk's past.
const HISTORY_MAX: usize = 300;

#[derive(clap::Args)]
#[command(after_help = "Example:
  ringdisk top --seconds 5

Keys: q quits, up and down select a disk, left and right select the column to sort by, r reverses the order, space
pauses. Below the table: the operations per second of the selected disk, and the latency of its requests.
'ringdisk stats' explains the columns, and prints them once or as JSON.")]
pub struct TopArgs {
    /// Seconds between two updates
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Control socket; default: control.qmp in /run/ringdisk (root), $XDG_RUNTIME_DIR/ringdisk, or the working directory
    #[arg(long, value_name = "PATH")]
    control: Option<std::path::PathBuf>,
}

pub fn top(args: &TopArgs) -> CommandResult {
    let connection = Connection {
        control: args.control.clone(),
        json: false,
    };
    let mut client = connection.open()?;
    let mut sample = Sample::new(&answer(&mut client)?);
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let no = io::Error::other("this is none");
        return Err(CommandLineError::Terminal(no));
    }
    let mut terminal = ratatui::try_init().map_err(CommandLineError::Terminal)?;
    let period = Duration::from_secs(args.seconds);
    let mut next = Instant::now() + period;
    let mut view = View::default();
    let result = loop {
        if let Err(e) = terminal.draw(|frame| view.draw(frame)) {
            break Err(CommandLineError::Terminal(e));
        }
        let left = next.saturating_duration_since(Instant::now());
        match key(left) {
            Ok(Some(key)) => match view.key(key) {
                Go::On => continue,
                Go::Away => break Ok(()),
            },
            Ok(None) if left > Duration::ZERO => continue,
            Ok(None) => {}
            Err(e) => break Err(CommandLineError::Terminal(e)),
        }
        next = Instant::now() + period;
        match answer(&mut client) {
            Ok(answer) => {
                let now = Sample::new(&answer);
                view.update(now.since(&sample), now.polling_since(&sample));
                sample = now;
            }
            Err(e) => break Err(e.into()),
        }
    };
    ratatui::restore();
    result
}

/// The next key, if one is pressed within this time.
fn key(within: Duration) -> io::Result<Option<KeyEvent>> {
    if !event::poll(within)? {
        return Ok(None);
    }
    Ok(match event::read()? {
        Event::Key(key) if key.kind == KeyEventKind::Press => Some(key),
        _ => None,
    })
}

#[derive(Debug, PartialEq)]
enum Go {
    On,
    Away,
}

#[derive(Default)]
struct View {
    disks: Vec<Rates>,
    /// What the I/O threads polled.
    polling: Option<String>,
    /// Operations per second, the latest last.
    past: BTreeMap<String, VecDeque<u64>>,
    chosen: Option<String>,
    /// The column that the table is sorted by.
    column: usize,
    ascending: bool,
    halted: bool,
}

impl View {
    fn update(&mut self, disks: Vec<Rates>, polling: Option<String>) {
        if self.halted {
            return;
        }
        self.polling = polling;
        self.past
            .retain(|name, _| disks.iter().any(|disk| disk.name == *name));
        for disk in &disks {
            let past = self.past.entry(disk.name.clone()).or_default();
            past.push_back(disk.iops() as u64);
            if past.len() > HISTORY_MAX {
                past.pop_front();
            }
        }
        self.disks = disks;
        self.sort();
    }

    fn sort(&mut self) {
        let column = self.column;
        self.disks.sort_by(|a, b| match column {
            // From a to z, but from much to little.
            0 => b.name.cmp(&a.name),
            _ => measure(a, column).total_cmp(&measure(b, column)),
        });
        if !self.ascending {
            self.disks.reverse();
        }
    }

    fn key(&mut self, key: KeyEvent) -> Go {
        let last = HEADINGS.len() - 1;
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Go::Away,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Go::Away,
            KeyCode::Left => self.column = self.column.checked_sub(1).unwrap_or(last),
            KeyCode::Right => self.column = (self.column + 1) % (last + 1),
            KeyCode::Char('r') => self.ascending = !self.ascending,
            KeyCode::Char(' ') => self.halted = !self.halted,
            KeyCode::Up => self.choose(|i| i.saturating_sub(1)),
            KeyCode::Down => self.choose(|i| i + 1),
            _ => {}
        }
        self.sort();
        Go::On
    }

    fn choose(&mut self, step: impl Fn(usize) -> usize) {
        let i = step(self.chosen()).min(self.disks.len().saturating_sub(1));
        self.chosen = self.disks.get(i).map(|disk| disk.name.clone());
    }

    /// The place of the chosen disk in the table.
    fn chosen(&self) -> usize {
        let place = |name: &String| self.disks.iter().position(|disk| disk.name == *name);
        self.chosen.as_ref().and_then(place).unwrap_or(0)
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let [head, polling, table, below] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(self.polling.is_some().into()),
            Constraint::Min(3),
            Constraint::Percentage(40),
        ])
        .areas(frame.area());
        frame.render_widget(self.heading(), head);
        if let Some(text) = &self.polling {
            frame.render_widget(Line::from(&**text), polling);
        }
        self.draw_table(frame, table);
        if let Some(disk) = self.disks.get(self.chosen()) {
            let [left, right] =
                Layout::horizontal([Constraint::Percentage(35), Constraint::Percentage(65)])
                    .areas(below);
            self.draw_past(frame, left, disk);
            draw_latencies(frame, right, disk);
        }
    }

    fn heading(&self) -> Line<'_> {
        let sum = |f: fn(&Rates) -> f64| self.disks.iter().map(f).sum::<f64>();
        let iops = count(sum(Rates::iops));
        let state = if self.halted { "  HALTED" } else { "" };
        let text = match self.disks.len() {
            0 => "no disk has been seen twice yet".into(),
            1 => format!("1 disk, {iops} operations/s"),
            n => format!("{n} disks, {iops} operations/s"),
        };
        Line::from(format!(
            "ringdisk: {text}{state}   q end  ↑↓ choose  ←→ sort  r turn round  space halt"
        ))
    }

    fn draw_table(&self, frame: &mut Frame<'_>, area: Rect) {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let sorted = bold.add_modifier(Modifier::UNDERLINED);
        let headings = HEADINGS.iter().enumerate().map(|(i, heading)| {
            let style = if i == self.column { sorted } else { bold };
            Line::styled(*heading, style)
        });
        let rows = self.disks.iter().map(|disk| {
            let style = if disk.connected {
                Style::new()
            } else {
                Style::new().add_modifier(Modifier::DIM)
            };
            Row::new(cells(disk)).style(style)
        });
        let mut widths = [Constraint::Length(8); HEADINGS.len()];
        widths[0] = Constraint::Min(8);
        let chosen = Style::new().add_modifier(Modifier::REVERSED);
        let table = Table::new(rows, widths)
            .header(Row::new(headings))
            .row_highlight_style(chosen);
        let mut state = TableState::new().with_selected(Some(self.chosen()));
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn draw_past(&self, frame: &mut Frame<'_>, area: Rect, disk: &Rates) {
        let title = format!(" {}: {} operations/s ", disk.name, count(disk.iops()));
        let width = area.width.saturating_sub(2) as usize;
        let past = self.past.get(&disk.name).into_iter().flatten();
        let past: Vec<u64> = past.copied().collect();
        let latest = &past[past.len().saturating_sub(width)..];
        let line = Sparkline::default()
            .block(Block::bordered().title(title))
            .data(latest);
        frame.render_widget(line, area);
    }
}

/// What a column shows, as a number to sort by.
fn measure(disk: &Rates, column: usize) -> f64 {
    let (done, total) = (&disk.done, &disk.latency.total);
    let percentile = |p| total.percentile_ns(p).unwrap_or(0) as f64;
    let part = |i: usize| disk.parts().map_or(0.0, |parts| parts[i]);
    match column {
        1 => disk.per_second(done.read.operations),
        2 => disk.per_second(done.write.operations),
        3 => disk.per_second(done.read.bytes),
        4 => disk.per_second(done.write.bytes),
        5 => disk.depth,
        6 => percentile(50.0),
        7 => percentile(99.0),
        8 => percentile(99.9),
        9 => disk.cpu_ns.unwrap_or(0.0),
        10 => part(0),
        11 => part(1),
        12 => part(2),
        _ => part(3),
    }
}

/// How many requests took how long, by powers of two.
fn draw_latencies(frame: &mut Frame<'_>, area: Rect, disk: &Rates) {
    const BAR: u16 = 6;
    let powers = powers(&disk.latency.total);
    let fits = usize::from(area.width.saturating_sub(2) / (BAR + 1));
    // The fastest are left out if there is no room: what is slow is what people look for.
    let bars = powers[powers.len().saturating_sub(fits)..].iter();
    let bars: Vec<Bar<'_>> = bars
        .map(|&(ns, n)| {
            let label = format!("<{}", time(ns as f64));
            Bar::default()
                .value(n)
                .text_value(count(n as f64))
                .label(Line::from(label))
        })
        .collect();
    let title = match disk.latency.total.mean_ns() {
        Some(mean) => format!(" {}: took {} in the mean ", disk.name, time(mean as f64)),
        None => format!(" {}: no request ", disk.name),
    };
    let chart = BarChart::default()
        .block(Block::bordered().title(title))
        .bar_width(BAR)
        .bar_gap(1)
        .data(BarGroup::default().bars(&bars));
    frame.render_widget(chart, area);
}

/// The first power of two beyond, in nanoseconds, and how many; from the first that holds any to the last.
fn powers(histogram: &Histogram) -> Vec<(u64, u64)> {
    let mut powers: Vec<(u64, u64)> = Vec::new();
    for (end, n) in histogram.buckets() {
        let power = end.next_power_of_two();
        while let Some(&(last, _)) = powers.last()
            && last < power
        {
            powers.push((last * 2, 0));
        }
        match powers.last_mut() {
            Some((_, sum)) => *sum += n,
            None => powers.push((power, n)),
        }
    }
    powers
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::rates::tests::answer;
    use super::*;

    fn screen(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn view() -> View {
        let mut view = View::default();
        let samples: Vec<_> = (1..5).map(|i| Sample::new(&answer(i))).collect();
        for two in samples.windows(2) {
            view.update(two[1].since(&two[0]), two[1].polling_since(&two[0]));
        }
        view
    }

    #[test]
    fn screen_shows_disks_and_the_selected_one() {
        let mut view = view();
        let text = screen(&view, 130, 24);
        for expected in [
            "2 disks, 12k operations/s",
            "polling takes 12% of a core",
            "P99.9",
            "25MB/s",
            " a: 8000 operations/s",
            "took 200us in the mean",
            "<262us",
        ] {
            assert!(text.contains(expected), "{expected} is not on\n{text}");
        }
        view.key(KeyCode::Down.into());
        let text = screen(&view, 130, 24);
        assert!(text.contains(" b: 4000 operations/s"), "{text}");
        // The choice follows the disk, not the line.
        view.key(KeyCode::Char('r').into());
        assert_eq!(view.disks[0].name, "b");
        assert!(screen(&view, 130, 24).contains(" b: 4000 operations/s"));
    }

    #[test]
    fn any_terminal_size_and_key_is_handled() {
        let mut view = view();
        let keys = [
            KeyCode::Up,
            KeyCode::Down,
            KeyCode::Left,
            KeyCode::Right,
            KeyCode::Char(' '),
        ];
        for i in 0..40u16 {
            assert_eq!(view.key(keys[usize::from(i) % keys.len()].into()), Go::On);
            screen(&view, 1 + i * 5, 1 + i);
        }
        screen(&View::default(), 80, 24);
        assert_eq!(view.key(KeyCode::Char('q').into()), Go::Away);
    }

    #[test]
    fn columns_sort_the_table() {
        let mut view = view();
        let first = |view: &View| view.disks[0].name.clone();
        assert_eq!(first(&view), "a");
        for column in 1..HEADINGS.len() {
            view.key(KeyCode::Right.into());
            let most = measure(&view.disks[0], column);
            assert!(most >= measure(&view.disks[1], column), "{column}");
        }
        view.key(KeyCode::Right.into());
        assert_eq!(view.column, 0);
    }
}
