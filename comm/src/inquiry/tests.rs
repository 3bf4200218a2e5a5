//! Tests which rank is blamed, and when none is.

use super::*;
use crate::health::Board;

/// Returns the health of one of three ranks, and a topic.
fn rank_0() -> (Arc<Health>, Topic) {
    (Health::new(0, Board::new(3), Arc::default(), None), Topic::collectives(7, &Arc::default()))
}

/// Rank 0 has asked rank 1, and rank 1 has answered that it waits for rank 2. Rank 2 is idle. Then the machine is
/// suspended until the deadline has passed and all answers are outdated.
#[test]
fn no_rank_is_blamed_after_the_machine_was_suspended() {
    let (health, topic) = rank_0();
    let _seat = topic.enter();
    let deadline = Deadline { started: Instant::now(), timeout: Duration::from_millis(1200) };
    let mut inquest = Inquest::new(&health, &topic, deadline);
    let answer = || {
        health.registry.answered(topic.id, 1, WaitState::Waiting { ranks: vec![2], moved: None });
        health.registry.answered(topic.id, 2, WaitState::Elsewhere);
    };
    while inquest.asked.len() < 2 {
        answer();
        inquest.pursue(&[1]);
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(2 * deadline.timeout);
    assert_eq!(inquest.left(), Some(Duration::ZERO));
    assert_eq!(inquest.verdict(&[1]), None, "all answers are from before the standstill");
    let blamed = loop {
        answer();
        inquest.pursue(&[1]);
        match inquest.verdict(&[1]) {
            None => std::thread::sleep(Duration::from_millis(10)),
            Some(rank) => break rank,
        }
    };
    assert_eq!(blamed, 2);
}

/// Rank 0 waits for rank 1, which receives data from rank 2 until the deadline has passed twice. Later, each answer
/// gives a slightly later time for the same data.
#[test]
fn a_rank_that_waits_for_data_of_others_is_not_blamed_while_the_data_moves() {
    let (health, topic) = rank_0();
    let _seat = topic.enter();
    let deadline = Deadline::after(Duration::from_millis(800));
    let mut inquest = Inquest::new(&health, &topic, deadline);
    let mut blamed = |until: Duration, moves: bool| {
        let mut last = Instant::now();
        while deadline.started.elapsed() < until {
            last = if moves { Instant::now() } else { last + Duration::from_micros(10) };
            let moved = Some(last);
            health.registry.answered(topic.id, 1, WaitState::Waiting { ranks: vec![2], moved });
            health.registry.answered(topic.id, 2, WaitState::Elsewhere);
            inquest.pursue(&[1]);
            if let Some(rank) = inquest.verdict(&[1]) {
                return Some(rank);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    };
    assert_eq!(blamed(2 * deadline.timeout, true), None);
    assert_eq!(blamed(Duration::MAX, false), Some(2));
}

/// A rank whose operation was given up keeps answering until its process ends, because others may ask before they
/// hear of the end.
#[test]
fn ranks_that_gave_up_do_not_answer_that_they_are_idle() {
    for blames in [true, false] {
        let (health, topic) = rank_0();
        let seat = topic.enter();
        let deadline = Deadline { started: Instant::now(), timeout: Duration::from_millis(200) };
        let mut inquest = Inquest::new(&health, &topic, deadline);
        while blames && inquest.verdict(&[1]).is_none() || !inquest.public {
            inquest.pursue(&[1]);
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(inquest);
        drop(seat);
        // Ask about the operation itself and about one that the rank has not reached.
        for asked in [topic.id, topic.id + 1] {
            let left = health.registry.wait_state(asked);
            assert_eq!(left == WaitState::Waiting { ranks: vec![1], moved: None }, blames, "{left:?}");
        }
    }
}
