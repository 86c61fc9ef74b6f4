//! What the pictures have in common.

use harness::svg::{Anchor, Svg};

use super::words::Server;

pub const WIDTH: f64 = 960.0;
pub const MARGIN: f64 = 24.0;
pub const HEADER: f64 = 104.0;
/// The width of each of two columns.
pub const PANEL: f64 = (WIDTH - 3.0 * MARGIN) / 2.0;

/// A server with its colour and its name in the legend.
pub type Contestant = (Server, &'static str, &'static str);

/// The title, the conditions of the run, and the legend.
pub fn header(svg: &mut Svg, conditions: &str, title: &str, legend: &[Contestant]) {
    svg.text((MARGIN, 34.0), Anchor::Start, "title", title);
    svg.text((MARGIN, 56.0), Anchor::Start, "text", conditions);
    let mut x = MARGIN;
    for (server, _, name) in legend {
        svg.rect((x, 72.0), (14.0, 14.0), &server.to_string(), "", "");
        svg.text((x + 20.0, 84.0), Anchor::Start, "legend", name);
        x += 44.0 + name.len() as f64 * 7.0;
    }
}

/// The style sheet. Each server's colour has the server's name as its class.
pub fn style(contestants: &[Contestant]) -> String {
    let mut style = String::from(
        "text{fill:#212529;font-size:12px}.title{font-size:20px;font-weight:bold}\
         .panel{font-size:13px;font-weight:bold}.legend{font-size:13px}.value{font-size:10px}.tick{font-size:11px}\
         .axis{stroke:#868e96}.grid{stroke:#dee2e6}.whisker{stroke:#343a40}polyline{fill:none}polyline.curve{stroke-width:2}",
    );
    for (server, colour, _) in contestants {
        style += &format!(
            "polyline.{server}{{stroke:{colour}}}rect.{server},circle.{server}{{fill:{colour}}}"
        );
    }
    style
}
