//! The figures as one HTML file with its plots in it, that needs nothing else.

use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

use plotters::prelude::*;

use super::histogram::Histogram;
use super::load::{Outcome, Sample};
use super::report::{self, Conditions, LATENCY_COLUMNS};
use crate::show;

const SIZE: (u32, u32) = (860, 360);
const INK: RGBColor = RGBColor(40, 50, 60);
const FAINT: RGBColor = RGBColor(222, 228, 234);
const COLORS: [RGBColor; 3] = [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115)];

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;color:#28323c;max-width:880px;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;width:100%}\
td,th{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #dee4ea;font-variant-numeric:tabular-nums}\
.latency td+td,.latency th+th{text-align:right}svg{width:100%;height:auto}p{color:#5a6672}";

/// The whole page.
///
/// # Errors
/// A plot that cannot be drawn.
pub fn render(conditions: &Conditions, outcome: &Outcome) -> Result<String, Box<dyn Error>> {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>tidelog bench</title>\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><style>{STYLE}</style></head><body>\n\
         <h1>tidelog bench</h1>\n"
    );
    table(&mut page, &report::figures(conditions, outcome))?;
    page += "<h2>Throughput</h2>\n";
    page += &throughput(conditions.plan.record_bytes as u64, &outcome.samples)?;
    page += "<h2>Latency</h2>\n";
    page += &latency(outcome)?;
    page += "<table class=\"latency\"><tr>";
    for column in LATENCY_COLUMNS {
        write!(page, "<th>{column}</th>")?;
    }
    page += "</tr>\n";
    for row in report::latency_rows(outcome) {
        let cells: String = row.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        writeln!(page, "<tr>{cells}</tr>")?;
    }
    writeln!(
        page,
        "</table>\n<p>One append of 64 is timed; its time includes about {} ns for the clock. A sync is timed from the \
         call to the answer that everything appended before is on the local disk, a persist to its handle.</p>",
        conditions.clock_nanos
    )?;
    page += "<h2>Conditions</h2>\n";
    table(&mut page, &conditions.rows())?;
    page += "</body></html>\n";
    Ok(page)
}

fn table(page: &mut String, rows: &[(&str, String)]) -> std::fmt::Result {
    page.push_str("<table>\n");
    for (name, value) in rows {
        writeln!(page, "<tr><th>{}</th><td>{}</td></tr>", escape(name), escape(value))?;
    }
    page.push_str("</table>\n");
    Ok(())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// MB/s between neighbouring samples.
fn rates(samples: &[Sample], record_bytes: u64, of: fn(&Sample) -> u64) -> Vec<(f64, f64)> {
    let zero = Sample { at: Duration::ZERO, records: 0, persisted: 0 };
    let before = std::iter::once(&zero).chain(samples);
    before
        .zip(samples)
        .map(|(before, now)| {
            let seconds = (now.at - before.at).as_secs_f64().max(1e-6);
            let bytes = of(now).saturating_sub(of(before)) * record_bytes;
            (now.at.as_secs_f64(), bytes as f64 / seconds / 1e6)
        })
        .collect()
}

/// What comes into objects comes in jumps, at checkpoints: its line is the average since the start.
fn throughput(record_bytes: u64, samples: &[Sample]) -> Result<String, Box<dyn Error>> {
    let appended = rates(samples, record_bytes, |sample| sample.records);
    let persisted: Vec<(f64, f64)> = samples
        .iter()
        .map(|sample| {
            (
                sample.at.as_secs_f64(),
                (sample.persisted * record_bytes) as f64 / sample.at.as_secs_f64().max(1e-6) / 1e6,
            )
        })
        .collect();
    let end = samples.last().map_or(1.0, |sample| sample.at.as_secs_f64());
    let top = appended.iter().chain(&persisted).map(|point| point.1).fold(1.0, f64::max) * 1.1;
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..end, 0.0..top)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(FAINT)
            .axis_style(INK)
            .label_style(("sans-serif", 14, &INK))
            .x_desc("seconds")
            .y_desc("MB/s")
            .y_label_formatter(&|rate| format!("{rate:.0}"))
            .draw()?;
        let lines = [("appended", appended), ("in objects, average so far", persisted)];
        for ((name, points), color) in lines.into_iter().zip(COLORS) {
            chart
                .draw_series(LineSeries::new(points, color.stroke_width(2)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(3)));
        }
        legend(&mut chart, SeriesLabelPosition::UpperLeft)?;
        root.present()?;
    }
    Ok(svg)
}

/// Quantiles on scales that give each further nine, and each power of ten, the same room.
fn latency(outcome: &Outcome) -> Result<String, Box<dyn Error>> {
    let lines: Vec<(&str, Vec<(f64, f64)>)> = report::latencies(outcome)
        .into_iter()
        .map(|(name, histogram)| (name, quantiles(histogram)))
        .collect();
    let all = || lines.iter().flat_map(|(_, points)| points);
    let right = all().map(|point| point.0).fold(1.0, f64::max);
    let low = all().map(|point| point.1).fold(f64::INFINITY, f64::min).min(6.0).floor();
    let high = all().map(|point| point.1).fold(low + 1.0, f64::max).ceil();
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..right, low..high)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(FAINT)
            .axis_style(INK)
            .label_style(("sans-serif", 14, &INK))
            .x_desc("share of all that was as fast")
            .x_labels(right as usize + 1)
            .y_labels((high - low) as usize + 1)
            .x_label_formatter(&|nines| show_share(*nines))
            .y_label_formatter(&|power| show_power(*power))
            .draw()?;
        for ((name, points), color) in lines.into_iter().zip(COLORS) {
            if points.is_empty() {
                continue;
            }
            chart
                .draw_series(LineSeries::new(points, color.stroke_width(2)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(3)));
        }
        legend(&mut chart, SeriesLabelPosition::LowerRight)?;
        root.present()?;
    }
    Ok(svg)
}

fn legend<'a, X, Y>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    position: SeriesLabelPosition,
) -> Result<(), Box<dyn Error>>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.85))
        .label_font(("sans-serif", 14, &INK))
        .draw()
        .map_err(|error| error.to_string().into())
}

/// (nines, power of ten of the nanoseconds), as far as there are enough times for the share to mean something.
fn quantiles(histogram: &Histogram) -> Vec<(f64, f64)> {
    if histogram.count() == 0 {
        return Vec::new();
    }
    let nines_max = (histogram.count() as f64).log10().clamp(0.3, 6.0);
    let steps = (nines_max * 20.0) as u32;
    let point = |step: u32| {
        let nines = f64::from(step) / 20.0;
        let nanos = histogram.quantile(1.0 - 10f64.powf(-nines)).as_nanos() as f64;
        (nines, nanos.max(1.0).log10())
    };
    (0..=steps).map(point).collect()
}

fn show_share(nines: f64) -> String {
    match nines.round() as i32 {
        0 => "fastest".to_owned(),
        1 => "90 %".to_owned(),
        2 => "99 %".to_owned(),
        nines => format!("99.{} %", "9".repeat(nines as usize - 2)),
    }
}

fn show_power(power: f64) -> String {
    let power = power.round().clamp(0.0, 19.0) as u32;
    let (less, unit) = match power {
        0..3 => (0, "ns"),
        3..6 => (3, "us"),
        6..9 => (6, "ms"),
        _ => (9, "s"),
    };
    format!("{} {unit}", show::count(10u64.pow(power - less)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_between_samples() {
        let sample =
            |millis, records, persisted| Sample { at: Duration::from_millis(millis), records, persisted };
        let samples = [sample(500, 1000, 0), sample(1000, 4000, 1000)];
        assert_eq!(rates(&samples, 1000, |sample| sample.records), [(0.5, 2.0), (1.0, 6.0)]);
        assert_eq!(rates(&samples, 1000, |sample| sample.persisted), [(0.5, 0.0), (1.0, 2.0)]);
    }

    #[test]
    fn axes_are_labelled_for_people() {
        assert_eq!(
            [0.0, 1.0, 2.0, 3.0, 4.0].map(show_share),
            ["fastest", "90 %", "99 %", "99.9 %", "99.99 %"]
        );
        assert_eq!([0.0, 2.0, 3.0, 8.0, 10.0].map(show_power), ["1 ns", "100 ns", "1 us", "100 ms", "10 s"]);
    }

    #[test]
    fn nothing_in_a_page_is_markup_by_chance() {
        assert_eq!(escape("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
    }
}
