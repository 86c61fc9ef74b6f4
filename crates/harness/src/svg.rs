//! Charts as SVG, without scripts, fonts or references to a network. Shapes have classes; their colours come from the
//! style of the page, or of the drawing if it is a file of its own.

use std::fmt::Write as _;

use crate::text::is_printable;

/// The largest width of a character in the charts' 12 px font, so that a text's width is known before it is drawn.
const CHARACTER: f64 = 7.0;

/// A drawing.
pub struct Svg {
    body: String,
    width: f64,
    height: f64,
}

/// Which point of a text its position refers to.
#[derive(Clone, Copy)]
pub enum Anchor {
    /// Its start.
    Start,
    /// Its middle.
    Middle,
    /// Its end.
    End,
}

/// The largest width of a text.
pub fn width(text: &str) -> f64 {
    text.chars().count() as f64 * CHARACTER
}

/// Escapes a text for markup.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c if !is_printable(c) && c != '\n' => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

impl Svg {
    /// An empty drawing.
    pub fn new(width: f64, height: f64) -> Svg {
        Svg {
            body: String::new(),
            width,
            height,
        }
    }

    /// A line through points.
    pub fn line(&mut self, points: &[(f64, f64)], class: &str) {
        let list: Vec<String> = points
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = writeln!(
            self.body,
            r#"<polyline class="{class}" points="{}"/>"#,
            list.join(" ")
        );
    }

    /// A filled shape.
    pub fn area(&mut self, points: &[(f64, f64)], class: &str) {
        let list: Vec<String> = points
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = writeln!(
            self.body,
            r#"<polygon class="{class}" points="{}"/>"#,
            list.join(" ")
        );
    }

    /// A rectangle with a tooltip; an empty `title` means none.
    pub fn rect(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        class: &str,
        style: &str,
        title: &str,
    ) {
        let style = if style.is_empty() {
            String::new()
        } else {
            format!(r#" style="{style}""#)
        };
        let _ = writeln!(
            self.body,
            r#"<rect class="{class}"{style} x="{x:.1}" y="{y:.1}" width="{:.1}" height="{:.1}">{}</rect>"#,
            width.max(0.0),
            height.max(0.0),
            tooltip(title)
        );
    }

    /// A point with a tooltip; an empty `title` means none.
    pub fn dot(&mut self, (x, y): (f64, f64), class: &str, title: &str) {
        let _ = writeln!(
            self.body,
            r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="3.5">{}</circle>"#,
            tooltip(title)
        );
    }

    /// A text.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{}</text>"#,
            escape(text)
        );
    }

    /// The drawing as a file, on white, with a style sheet for its classes. Screen readers read `name`.
    pub fn standalone(self, name: &str, style: &str) -> String {
        let Svg {
            body,
            width,
            height,
        } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"Helvetica, Arial, DejaVu Sans, sans-serif\">\n\
             <style>{style}</style>\n<rect width=\"{width:.0}\" height=\"{height:.0}\" fill=\"#ffffff\"/>\n{body}</svg>\n",
            escape(name)
        )
    }

    /// The drawing as an element of a page. Screen readers read `name`.
    pub fn finish(self, name: &str) -> String {
        let Svg {
            body,
            width,
            height,
        } = self;
        format!(
            "<svg role=\"img\" aria-label=\"{}\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\n{body}</svg>\n",
            escape(name)
        )
    }
}

/// A tooltip, if there is a text.
fn tooltip(title: &str) -> String {
    match title {
        "" => String::new(),
        title => format!("<title>{}</title>", escape(title)),
    }
}

/// Up to six round numbers for an axis from 0 to at least `most`.
pub fn ticks(most: f64) -> Vec<f64> {
    if !(most.is_finite() && most > 0.0) {
        return vec![0.0, 1.0];
    }
    let raw = most / 4.0;
    let power = 10_f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= raw * 0.999);
    let step = step.unwrap_or(10.0 * power);
    (0..=(most / step).ceil() as usize)
        .map(|n| n as f64 * step)
        .collect()
}

/// 970, 9.7k, 131k, 1.41M.
pub fn short(value: f64) -> String {
    let digits = |value: f64, unit: &str| match value {
        ..9.995 => format!("{}{unit}", trimmed(value, 2)),
        ..99.95 => format!("{}{unit}", trimmed(value, 1)),
        _ => format!("{value:.0}{unit}"),
    };
    match value.abs() {
        ..999.5 => digits(value, ""),
        ..999_500.0 => digits(value / 1e3, "k"),
        ..999_500_000.0 => digits(value / 1e6, "M"),
        _ => digits(value / 1e9, "G"),
    }
}

fn trimmed(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_and_numbers_are_round() {
        assert_eq!(ticks(97.0), [0.0, 25.0, 50.0, 75.0, 100.0]);
        assert_eq!(ticks(1234.0), [0.0, 500.0, 1000.0, 1500.0]);
        for most in [0.0, 1e-9, 3.0, 7e12, f64::NAN, f64::INFINITY] {
            let ticks = ticks(most);
            assert!((2..=6).contains(&ticks.len()), "{most}: {ticks:?}");
        }
        let shorts = [970.0, 9_700.0, 131_000.0, 1_410_000.0, 0.25].map(short);
        assert_eq!(shorts, ["970", "9.7k", "131k", "1.41M", "0.25"]);
    }

    #[test]
    fn nothing_in_a_name_is_markup() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text((0.0, 0.0), Anchor::Start, "t", "<script>\"&'\u{1}");
        assert!(
            svg.finish("<b>")
                .contains("&lt;script&gt;&quot;&amp;&#39; ")
        );
    }
}
