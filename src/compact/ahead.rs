//! Futures that run at the same time and end in the order in which they were begun.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// What is under way. Nothing is begun before somebody waits for the [next](Ahead::next) result.
pub(super) struct Ahead<'a, T> {
    under_way: VecDeque<State<'a, T>>,
}

enum State<'a, T> {
    Running(Pin<Box<dyn Future<Output = T> + 'a>>),
    Ended(T),
}

impl<'a, T> Ahead<'a, T> {
    pub(super) fn new() -> Ahead<'a, T> {
        Ahead { under_way: VecDeque::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.under_way.len()
    }

    pub(super) fn push(&mut self, future: impl Future<Output = T> + 'a) {
        self.under_way.push_back(State::Running(Box::pin(future)));
    }

    /// What the oldest came to; `None` if there is none.
    pub(super) async fn next(&mut self) -> Option<T> {
        poll_fn(|context| {
            for state in &mut self.under_way {
                if let State::Running(future) = state
                    && let Poll::Ready(output) = future.as_mut().poll(context)
                {
                    *state = State::Ended(output);
                }
            }
            match self.under_way.pop_front() {
                None => Poll::Ready(None),
                Some(State::Ended(output)) => Poll::Ready(Some(output)),
                Some(running) => {
                    self.under_way.push_front(running);
                    Poll::Pending
                }
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_whatever_ends_first() {
        let mut ahead = Ahead::new();
        let (resolvers, pending): (Vec<_>, Vec<_>) = (0..4).map(|_| tidelog_upload::channel::<u32>()).unzip();
        pending.into_iter().for_each(|pending| ahead.push(pending));
        assert_eq!(ahead.len(), 4);
        std::thread::spawn(move || {
            for (number, resolver) in resolvers.into_iter().enumerate().rev() {
                resolver.resolve(number as u32);
            }
        });
        for number in 0..4 {
            assert_eq!(tidelog_upload::block_on(ahead.next()), Some(Ok(number)));
        }
        assert_eq!(tidelog_upload::block_on(ahead.next()), None);
    }
}
