//! Nobody serves a role for a while, because its only supernode is being rebuilt: what runs waits, up to a limit (E.6).

use deepinfer_protocol::Span;
use deepinfer_protocol::message::Message;
use deepinfer_serving::gateway::{EndedEarly, GatewayAction, GatewayEvent, GatewayOptions};

use crate::scripted::{Scripted, sent};

/// A request that was running when the last rank was lost, and is parked again.
fn waiting(limit: Span) -> Scripted {
    let mut options = GatewayOptions::default();
    options.times.resume = limit;
    let mut test = Scripted::new(options);
    test.run(1);
    test.lose("d0");
    test.lose("d1");
    test.after(Span::secs(1));
    test.prefill(1, 1, 1, 51, "p1");
    assert_eq!(test.state(), "decode_queued");
    test
}

#[test]
fn a_request_waits_for_a_rank_and_goes_on_when_one_comes() {
    let mut test = waiting(Span::secs(600));
    for _ in 0..590 {
        test.after(Span::secs(1));
    }
    assert_eq!(test.state(), "decode_queued");
    let out = test.tell(GatewayEvent::PeerUp("d0".into()));
    assert!(matches!(sent(&out)[..], [("d0", Message::Place(_))]), "{out:?}");
    // The time without anybody counts from the last that served.
    test.lose("d0");
    for _ in 0..590 {
        test.after(Span::secs(1));
    }
    test.tell(GatewayEvent::PeerUp("d0".into()));
    test.decode(1, 1, "d0");
    assert_eq!(test.state(), "decode_running");
}

#[test]
fn a_request_fails_with_its_id_when_nobody_has_served_for_the_limit() {
    let mut test = waiting(Span::secs(20));
    test.after(Span::secs(18));
    assert_eq!(test.state(), "decode_queued");
    let out = test.after(Span::secs(2));
    let [GatewayAction::Ended { why: EndedEarly::Failed { detail }, .. }, rest @ ..] = &out[..] else {
        panic!("{out:?}");
    };
    assert!(
        detail.contains("no decode rank has served for 20 s") && detail.contains("request 0"),
        "{detail}"
    );
    assert!(test.sent_cancel(rest, "p1", 1, 1), "its holder is told");
    assert_eq!(test.gateway.holds(), 0);
}
