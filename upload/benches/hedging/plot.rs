//! Distributions as curves, in an SVG that can be read on light and on dark pages.

use std::fmt::Write;

pub struct Curve<'a> {
    pub name: &'a str,
    pub values: &'a [f64],
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 52.0;

/// From light and dark pages alike these stand out, and from each other also without colours seen.
const STROKES: [(&str, &str); 5] = [
    ("#8a8f98", "7 4"),
    ("#a371f7", "9 3 2 3"),
    ("#d08700", "2 3"),
    ("#2f81f7", "none"),
    ("#2da44e", "none"),
];

/// The share of checkpoints that took at most so many milliseconds.
pub fn svg(what: &str, curves: &[Curve<'_>]) -> String {
    let longest = curves.iter().flat_map(|curve| curve.values).copied().fold(1.0, f64::max);
    let end = (longest.min(2000.0) / 250.0).ceil() * 250.0;
    let x = |ms: f64| LEFT + (WIDTH - LEFT - RIGHT) * (ms.min(end) / end);
    let y = |share: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share;
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    line(format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Checkpoint times of {what}, cumulative" font-family="system-ui, sans-serif" font-size="13">"#
    ));
    line(
        "<style>.page{fill:#fff}.ink{fill:#1f2328}.grid{stroke:#d1d9e0}\
         @media(prefers-color-scheme:dark){.page{fill:#0d1117}.ink{fill:#e6edf3}.grid{stroke:#30363d}}</style>"
            .to_owned(),
    );
    line(format!(r#"<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>"#));
    line(format!(
        r#"<text class="ink" x="{LEFT}" y="24" font-size="15">Checkpoints of {what}: share done within a time (simulated)</text>"#
    ));
    for step in 0..=4 {
        let share = f64::from(step) / 4.0;
        let at = y(share);
        line(format!(r#"<line class="grid" x1="{LEFT}" y1="{at:.1}" x2="{}" y2="{at:.1}"/>"#, WIDTH - RIGHT));
        line(format!(
            r#"<text class="ink" x="{}" y="{:.1}" text-anchor="end">{:.0} %</text>"#,
            LEFT - 8.0,
            at + 4.0,
            share * 100.0
        ));
    }
    let mut ms = 0.0;
    while ms <= end {
        let at = x(ms);
        line(format!(
            r#"<line class="grid" x1="{at:.1}" y1="{TOP}" x2="{at:.1}" y2="{}"/>"#,
            HEIGHT - BOTTOM
        ));
        line(format!(
            r#"<text class="ink" x="{at:.1}" y="{}" text-anchor="middle">{ms:.0}</text>"#,
            HEIGHT - BOTTOM + 18.0
        ));
        ms += 250.0;
    }
    line(format!(
        r#"<text class="ink" x="{:.1}" y="{}" text-anchor="middle">milliseconds until the slowest node is done</text>"#,
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 12.0
    ));
    for (nth, (curve, (colour, dashes))) in curves.iter().zip(STROKES).enumerate() {
        line(path(curve.values, colour, dashes, x, y));
        let at = HEIGHT - BOTTOM - 14.0 - 20.0 * (curves.len() - 1 - nth) as f64;
        let from = WIDTH - RIGHT - 230.0;
        line(format!(
            r#"<line x1="{from}" y1="{0:.1}" x2="{1}" y2="{0:.1}" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"/>"#,
            at - 4.0,
            from + 30.0
        ));
        line(format!(r#"<text class="ink" x="{}" y="{at:.1}">{}</text>"#, from + 38.0, curve.name));
    }
    line("</svg>".to_owned());
    out
}

/// About 200 points of a curve: more would not be seen.
fn path(
    values: &[f64],
    colour: &str,
    dashes: &str,
    x: impl Fn(f64) -> f64,
    y: impl Fn(f64) -> f64,
) -> String {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut points = String::new();
    for step in 0..=200 {
        let share = f64::from(step) / 200.0;
        let at = ((sorted.len() - 1) as f64 * share) as usize;
        // Writing to a string cannot fail.
        let _ = write!(points, "{}{:.1} {:.1}", if step == 0 { 'M' } else { 'L' }, x(sorted[at]), y(share));
    }
    format!(
        r#"<path d="{points}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"/>"#
    )
}
