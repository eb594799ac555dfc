//! What goes wrong, for whom and how often. Decides only; server/http.rs carries it out.

use std::time::Duration;

use tidelog_upload::Operation;

/// One thing that goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// The request is looked at only after this time.
    Delay(Duration),
    /// The request takes effect at once, the answer comes after this time.
    DelayAnswer(Duration),
    /// The body is taken and given at most this fast.
    Bandwidth {
        /// In each direction.
        bytes_per_second: u64,
    },
    /// 503 SlowDown; nothing is done.
    SlowDown,
    /// 500 InternalError; nothing is done.
    InternalError,
    /// 200, and an InternalError in the body, as Complete may answer.
    ErrorInBody {
        /// Whether it took effect all the same.
        applied: bool,
    },
    /// The connection is closed before anything is done.
    Drop,
    /// The request takes effect, and then the connection is closed without an answer.
    DropAnswer,
    /// The request, wholly received, takes effect this long after the client has given it up.
    ApplyLate(Duration),
    /// There is no answer and no effect.
    Hang,
    /// 400 ExpiredToken; nothing is done.
    ExpiredToken,
    /// 403 RequestTimeTooSkewed; nothing is done. [`S3Server::set_clock_offset`](crate::S3Server::set_clock_offset)
    /// gives the real thing.
    ClockSkew,
    /// 403 AccessDenied; nothing is done.
    Denied,
    /// 301 PermanentRedirect to another region, without a place to go to; nothing is done.
    Redirect,
    /// 409 OperationAborted, as for a Complete while another one runs; nothing is done.
    Conflict,
}

/// How often a rule strikes, of the requests that it is about.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    Always,
    Nth(u64),
    First(u64),
    Probability(f64),
}

/// A fault and the requests that it is about: all of them, unless told otherwise.
///
/// ```
/// use tidelog_testing::{Fault, Rule};
/// use tidelog_upload::Operation;
///
/// // The second part sent to this bucket is refused.
/// let rule = Rule::new(Fault::SlowDown).bucket("bucket-0").operation(Operation::PutPart).nth(2);
/// ```
#[derive(Clone, Debug)]
pub struct Rule {
    fault: Fault,
    bucket: Option<String>,
    operation: Option<Operation>,
    name_prefix: String,
    when: When,
    seen: u64,
}

impl Rule {
    /// This fault, always, for every request.
    #[must_use]
    pub fn new(fault: Fault) -> Rule {
        Rule { fault, bucket: None, operation: None, name_prefix: String::new(), when: When::Always, seen: 0 }
    }

    /// Only in this bucket.
    #[must_use]
    pub fn bucket(mut self, bucket: &str) -> Rule {
        self.bucket = Some(bucket.to_owned());
        self
    }

    /// Only for this operation.
    #[must_use]
    pub fn operation(mut self, operation: Operation) -> Rule {
        self.operation = Some(operation);
        self
    }

    /// Only for objects whose names start with this.
    #[must_use]
    pub fn name_prefix(mut self, prefix: &str) -> Rule {
        prefix.clone_into(&mut self.name_prefix);
        self
    }

    /// Only for the `n`th such request, from 1.
    #[must_use]
    pub fn nth(mut self, n: u64) -> Rule {
        self.when = When::Nth(n);
        self
    }

    /// Only for the first `n` such requests.
    #[must_use]
    pub fn first(mut self, n: u64) -> Rule {
        self.when = When::First(n);
        self
    }

    /// For each such request with this probability, from the seed that the server was started with.
    #[must_use]
    pub fn probability(mut self, probability: f64) -> Rule {
        self.when = When::Probability(probability);
        self
    }
}

/// What a request is about.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) operation: Operation,
    pub(crate) bucket: String,
    pub(crate) name: String,
}

/// All that happens to one request.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    pub(crate) delay: Duration,
    pub(crate) delay_answer: Duration,
    pub(crate) bytes_per_second: Option<u64>,
    /// The first one that decides the outcome.
    pub(crate) outcome: Option<Fault>,
}

/// The rules in force.
#[derive(Debug)]
pub(crate) struct Faults {
    pub(crate) rules: Vec<Rule>,
    random: SplitMix,
}

impl Faults {
    pub(crate) fn new(seed: u64) -> Faults {
        Faults { rules: Vec::new(), random: SplitMix(seed) }
    }

    /// Every rule that is about the request counts it, whatever the others do.
    pub(crate) fn strike(&mut self, target: &Target) -> Effects {
        let mut effects = Effects::default();
        for rule in &mut self.rules {
            let about = rule.bucket.as_ref().is_none_or(|bucket| *bucket == target.bucket)
                && rule.operation.is_none_or(|operation| operation == target.operation)
                && target.name.starts_with(&rule.name_prefix);
            if !about {
                continue;
            }
            rule.seen += 1;
            let strikes = match rule.when {
                When::Always => true,
                When::Nth(n) => rule.seen == n,
                When::First(n) => rule.seen <= n,
                When::Probability(probability) => self.random.chance(probability),
            };
            if !strikes {
                continue;
            }
            match rule.fault {
                Fault::Delay(delay) => effects.delay += delay,
                Fault::DelayAnswer(delay) => effects.delay_answer += delay,
                Fault::Bandwidth { bytes_per_second } => effects.bytes_per_second = Some(bytes_per_second),
                fault => effects.outcome = effects.outcome.or(Some(fault)),
            }
        }
        effects
    }
}

/// Numbers that look random, the same ones for the same seed.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix(pub(crate) u64);

impl SplitMix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        ((self.next() >> 11) as f64) < probability * (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(operation: Operation, bucket: &str, name: &str) -> Target {
        Target { operation, bucket: bucket.to_owned(), name: name.to_owned() }
    }

    #[test]
    fn rules_are_about_what_they_say() {
        let mut faults = Faults::new(1);
        faults
            .rules
            .push(Rule::new(Fault::SlowDown).bucket("a").operation(Operation::Put).name_prefix("x/").nth(2));
        faults.rules.push(Rule::new(Fault::Hang).bucket("a").first(4));
        faults.rules.push(Rule::new(Fault::Delay(Duration::from_secs(1))));
        let mut outcomes = Vec::new();
        for target in [
            target(Operation::Put, "a", "x/1"),
            target(Operation::Put, "a", "y/1"),
            target(Operation::Get, "a", "x/1"),
            target(Operation::Put, "b", "x/1"),
            target(Operation::Put, "a", "x/2"),
            target(Operation::Put, "a", "x/3"),
        ] {
            let effects = faults.strike(&target);
            assert_eq!(effects.delay, Duration::from_secs(1));
            outcomes.push(effects.outcome);
        }
        let hang = Some(Fault::Hang);
        assert_eq!(outcomes, [hang, hang, hang, None, Some(Fault::SlowDown), None]);
    }

    #[test]
    fn a_probability_is_kept_and_repeats_with_its_seed() {
        let run = |seed| -> Vec<bool> {
            let mut faults = Faults::new(seed);
            faults.rules.push(Rule::new(Fault::Drop).probability(0.1));
            (0..10_000).map(|_| faults.strike(&target(Operation::Get, "a", "x")).outcome.is_some()).collect()
        };
        let struck = run(7).iter().filter(|struck| **struck).count();
        assert!((900..1100).contains(&struck), "{struck}");
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }
}
