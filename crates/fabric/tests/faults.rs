//! What must not pass: late, lost, damaged, foreign and oversize messages; dead peers.

mod common;

use common::{LOCALHOST, TOKEN, both, local};
use fabric::{Endpoint, FabricError, FabricOptions, Fault, Group, Operation, ReducePlan, ShmWorld, TcpListenerHandle};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

fn pair() -> Group {
    Group::new(4, "pair", vec![0, 1])
}

fn options() -> FabricOptions {
    FabricOptions { deadline_ms: 5_000, generation: 7, ..FabricOptions::default() }
}

fn two(transport: &str, options: &FabricOptions) -> (Endpoint, Endpoint) {
    let mut ends = local(transport, &[options.clone(), options.clone()]);
    let second = ends.pop().expect("two");
    (ends.pop().expect("two"), second)
}

#[test]
fn a_receive_without_a_sender_ends_at_the_deadline() {
    both(|transport| {
        let (a, _b) = two(transport, &FabricOptions { deadline_ms: 120, ..options() });
        let start = Instant::now();
        let error = a.recv(&pair(), 1, &mut [0.0; 4]).expect_err("nobody sends");
        let waited = start.elapsed();
        assert!(waited >= Duration::from_millis(120) && waited < Duration::from_secs(20), "{waited:?}");
        let FabricError::Deadline { operation, rank, direction, sequence, .. } = &error else { panic!("{error}") };
        assert_eq!((*operation, *rank, *direction, *sequence), (Operation::Receive, 1, "for", 0));
        assert!(error.to_string().contains("recv in group pair"), "{error}");
        assert_eq!(a.barrier(&pair()).expect_err("it stays failed"), error);
    });
}

#[test]
fn a_send_that_nobody_takes_ends_at_the_deadline() {
    both(|transport| {
        let (a, _b) = two(transport, &FabricOptions { deadline_ms: 150, ..options() });
        let error = a.send(&pair(), 1, &vec![0.0; 16 << 20]).expect_err("nobody takes 64 MiB");
        assert!(matches!(error, FabricError::Deadline { direction: "to send to", rank: 1, .. }), "{error}");
    });
}

#[test]
fn abort_wakes_a_blocked_receiver_at_once() {
    both(|transport| {
        let (a, b) = two(transport, &options());
        let aborter = a.aborter();
        std::thread::scope(|scope| {
            let blocked = scope.spawn(|| {
                let error = a.recv_bytes(&pair(), 1).expect_err("aborted");
                (error, Instant::now())
            });
            std::thread::sleep(Duration::from_millis(60));
            let called = Instant::now();
            aborter.abort("the operator said so");
            let (error, woken) = blocked.join().expect("no panic");
            assert_eq!(error, FabricError::Aborted { reason: "the operator said so".into() });
            assert!(woken - called < Duration::from_secs(2), "{:?}", woken - called);
        });
        a.abort("a second reason");
        let later = a.send(&pair(), 1, &[1.0]).expect_err("aborted");
        assert_eq!(later, FabricError::Aborted { reason: "the operator said so".into() });
        // The other side is not aborted; it sees the end of its peer.
        drop(a);
        aborter.abort("after the end: no effect, no crash");
        let error = b.recv_bytes(&pair(), 0).expect_err("closed");
        assert!(matches!(error, FabricError::PeerGone { rank: 0, .. }), "{error}");
    });
}

#[test]
fn abort_wakes_a_blocked_sender_too() {
    both(|transport| {
        let (a, _b) = two(transport, &options());
        std::thread::scope(|scope| {
            let blocked = scope.spawn(|| (a.send(&pair(), 1, &vec![0.0; 16 << 20]), Instant::now()));
            std::thread::sleep(Duration::from_millis(60));
            let called = Instant::now();
            a.abort("enough");
            let (result, woken) = blocked.join().expect("no panic");
            assert_eq!(result, Err(FabricError::Aborted { reason: "enough".into() }));
            assert!(woken - called < Duration::from_secs(2), "{:?}", woken - called);
        });
    });
}

/// Sends one message with `fault`, then another; the receiver's error.
fn damaged(transport: &str, fault: Fault, len: usize) -> FabricError {
    let (a, b) = two(transport, &options());
    a.inject(fault);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The receiver may have hung up by the second message.
            let _ = a.send(&pair(), 1, &vec![1.0; len]).and_then(|()| a.send(&pair(), 1, &vec![1.0; len]));
        });
        let error = b.recv(&pair(), 0, &mut vec![0.0; len]).expect_err("damage must be noticed");
        drop(b);
        error
    })
}

#[test]
fn damage_on_the_way_is_named() {
    both(|transport| {
        for len in [1, 1_000, 300_000] {
            for bit in [0, 77, 1 << 40] {
                let error = damaged(transport, Fault::FlipPayloadBit(bit), len);
                let FabricError::Mismatch { what, rank, sequence, group, .. } = &error else { panic!("{error}") };
                let named = (*what, *rank, *sequence, group.as_str());
                assert_eq!(named, ("payload checksum", 0, 0, "pair"), "{len} numbers, bit {bit}");
            }
            let error = damaged(transport, Fault::FlipHeaderBit(100), len);
            assert!(matches!(error, FabricError::Mismatch { what: "header checksum", .. }), "{error}");
            let error = damaged(transport, Fault::FlipHeaderBit(3), len);
            assert!(matches!(error, FabricError::Mismatch { what: "magic", .. }), "{error}");
            let error = damaged(transport, Fault::Lose, len);
            let FabricError::Mismatch { what: "sequence", expected, got, .. } = &error else { panic!("{error}") };
            assert_eq!((expected.as_str(), got.as_str()), ("0", "1"));
        }
    });
}

#[test]
fn damage_inside_a_collective_is_noticed() {
    both(|transport| {
        let (a, b) = two(transport, &options());
        let plan = ReducePlan::even(2, 2, 500_000);
        let data = vec![1.0f32; 500_000];
        a.inject(Fault::FlipPayloadBit(12_345));
        std::thread::scope(|scope| {
            let sum = |end: Endpoint, me: usize| {
                let mut out = vec![0.0; 500_000];
                end.all_reduce(&pair(), &plan, &[(me..me + 1, &data)], &mut out)
            };
            let first = scope.spawn(move || sum(a, 0));
            let error = sum(b, 1).expect_err("damaged");
            assert!(matches!(error, FabricError::Mismatch { what: "payload checksum", rank: 0, .. }), "{error}");
            let error = first.join().expect("no panic").expect_err("its peer gave up");
            assert!(matches!(error, FabricError::PeerGone { rank: 1, .. }), "{error}");
        });
    });
}

#[test]
fn damage_to_what_was_posted_is_noticed_by_who_takes_it() {
    both(|transport| {
        for between in [false, true] {
            let (a, b) = two(transport, &options());
            let plan = ReducePlan::even(2, 2, 500_000);
            a.inject(Fault::FlipPayloadBit(12_345));
            std::thread::scope(|scope| {
                let sum = |end: Endpoint, me: usize| {
                    let posted = end.post_sum(&pair(), &plan, vec![(me..me + 1, vec![1.0; 500_000])], true)?;
                    for _ in 0..if between { 2_000 } else { 0 } {
                        end.progress()?;
                        std::thread::yield_now();
                    }
                    end.take_whole(&pair(), &plan, posted, &mut []).map(drop)
                };
                let first = scope.spawn(move || sum(a, 0));
                let error = sum(b, 1).expect_err("damaged");
                assert!(matches!(error, FabricError::Mismatch { what: "payload checksum", rank: 0, .. }), "{error}");
                let error = first.join().expect("no panic").expect_err("its peer gave up");
                assert!(matches!(error, FabricError::PeerGone { rank: 1, .. }), "{error}");
            });
        }
    });
}

#[test]
fn without_checksums_damage_passes() {
    // The twin of the tests above: it is the checksum that notices.
    let (a, b) = two("shm", &FabricOptions { checksum: false, ..options() });
    a.inject(Fault::FlipPayloadBit(0));
    a.send(&pair(), 1, &[1.0]).expect("send");
    let mut got = [0.0];
    b.recv(&pair(), 0, &mut got).expect("receive");
    assert_eq!(got[0].to_bits(), 1.0f32.to_bits() ^ 1);
}

#[test]
fn another_generation_is_refused() {
    let ends = local("shm", &[options(), FabricOptions { generation: 6, ..options() }]);
    ends[1].send(&pair(), 0, &[1.0]).expect("the zombie does not know yet");
    let error = ends[0].recv(&pair(), 1, &mut [0.0]).expect_err("stale");
    let FabricError::Mismatch { what: "generation", expected, got, rank: 1, .. } = &error else { panic!("{error}") };
    assert_eq!((expected.as_str(), got.as_str()), ("7", "6"));
}

#[test]
fn wrong_length_and_wrong_operation_are_named() {
    both(|transport| {
        let (a, b) = two(transport, &options());
        a.send(&pair(), 1, &[1.0; 3]).expect("send");
        let error = b.recv(&pair(), 0, &mut [0.0; 4]).expect_err("3 for 4");
        let FabricError::Mismatch { what: "byte count", expected, got, .. } = &error else { panic!("{error}") };
        assert_eq!((expected.as_str(), got.as_str()), ("16", "12"));

        let (a, b) = two(transport, &options());
        a.send(&pair(), 1, &[1.0; 3]).expect("send");
        let error = b.broadcast(&pair(), 0, &mut Vec::new()).expect_err("a send is no broadcast");
        let FabricError::Mismatch { what: "operation", expected, got, .. } = &error else { panic!("{error}") };
        assert_eq!((expected.as_str(), got.as_str()), ("broadcast", "point-to-point"));

        let (a, b) = two(transport, &options());
        a.send(&pair(), 1, &[]).expect("send");
        let error = b.barrier(&pair()).expect_err("a send is no barrier, even of the same length");
        assert!(matches!(error, FabricError::Mismatch { what: "operation", .. }), "{error}");
    });
}

#[test]
fn limits_in_bytes_hold_on_both_sides() {
    both(|transport| {
        let small = FabricOptions { message_bytes_max: 100, ..options() };
        let mut ends = local(transport, &[options(), small]);
        let (b, a) = (ends.pop().expect("two"), ends.pop().expect("two"));
        let error = b.send_bytes(&pair(), 0, &[0; 101]).expect_err("over its own limit");
        assert!(matches!(error, FabricError::Oversize { direction: "to", bytes: 101, bytes_max: 100, .. }), "{error}");
        b.send_bytes(&pair(), 0, &[0; 100]).expect("nothing was sent, the endpoint is sound");
        assert_eq!(a.recv_bytes(&pair(), 1).expect("receive").len(), 100);
        a.send_bytes(&pair(), 1, &[0; 101]).expect("within the sender's limit");
        let error = b.recv_bytes(&pair(), 0).expect_err("over the receiver's limit");
        assert!(
            matches!(error, FabricError::Oversize { direction: "from", rank: 0, bytes: 101, bytes_max: 100, .. }),
            "{error}"
        );

        let narrow = FabricOptions { mailbox_bytes_max: 1_000, ..options() };
        let (a, b) = two(transport, &narrow);
        let other = Group::new(5, "other", vec![0, 1]);
        for _ in 0..11 {
            a.send_bytes(&other, 1, &[0; 100]).expect("send");
        }
        let error = b.recv_bytes(&pair(), 0).expect_err("nobody receives those");
        assert!(matches!(error, FabricError::MailboxFull { rank: 0, bytes: 1_100, bytes_max: 1_000 }), "{error}");
    });
}

#[test]
fn wrong_arguments_are_named_and_leave_the_endpoint_sound() {
    let (a, b) = two("shm", &options());
    let plan = ReducePlan::even(4, 2, 10);
    let data = [1.0f32; 10];
    let all: [Result<(), FabricError>; 6] = [
        a.send(&pair(), 2, &[1.0]),
        a.send(&Group::new(9, "elsewhere", vec![1]), 0, &[1.0]),
        a.send(&Group::new(9, "far", vec![0, 9]), 1, &[1.0]),
        a.recv(&pair(), 0, &mut [1.0]),
        a.reduce_scatter(&pair(), &plan, &[(0..1, &data)], &mut [0.0; 5]),
        a.reduce_scatter(&pair(), &plan, &[(0..2, &data[..9])], &mut [0.0; 5]),
    ];
    let wanted = ["member 2 of 2", "not among", "below 2", "itself", "the plan says [0..2]", "parts end at 10"];
    for (result, wanted) in all.into_iter().zip(wanted) {
        let error = result.expect_err(wanted);
        assert!(matches!(error, FabricError::Argument { .. }), "{error}");
        assert!(error.to_string().contains(wanted), "{error}");
    }
    a.send(&pair(), 1, &[1.0]).expect("sound");
    b.recv(&pair(), 0, &mut [0.0]).expect("sound");
}

#[test]
fn shared_memory_is_checked_at_the_door() {
    let shared = ShmWorld::create(2, &options()).expect("memory");
    let attach = |fd, rank, world| match ShmWorld::attach(fd, rank, world, &options()) {
        Ok(_) => panic!("let in"),
        Err(error) => error.to_string(),
    };
    assert!(attach(shared.fd(), 0, 3).contains("made for 2 ranks, asked for 3"));
    assert!(attach(shared.fd(), 2, 2).contains("rank 2 in a world of 2"));
    assert!(attach(-1, 0, 2).contains("/proc/self/fd/-1"));
    let end = ShmWorld::attach_path(&shared.path(), 0, 2, &options()).expect("attach");
    assert!(attach(shared.fd(), 0, 2).contains("rank 0 is taken"));
    shared.mark_dead(1);
    let error = end.recv_bytes(&pair(), 1).expect_err("marked dead");
    assert!(matches!(error, FabricError::PeerGone { rank: 1, .. }), "{error}");
}

/// Connects two ranks of which the second differs by token and generation.
fn strangers(token: [u8; 32], generation: u32) -> (FabricError, FabricError) {
    let (first, addr_first) = TcpListenerHandle::bind(LOCALHOST).expect("bind");
    let (second, addr_second) = TcpListenerHandle::bind(LOCALHOST).expect("bind");
    let addrs = [addr_first, addr_second];
    std::thread::scope(|scope| {
        let patient = FabricOptions { deadline_ms: 1_000, ..options() };
        let first = scope.spawn(move || first.connect(0, &addrs, &TOKEN, &patient).err());
        let options = FabricOptions { generation, ..options() };
        let refused = second.connect(1, &addrs, &token, &options).err().expect("refused");
        (first.join().expect("no panic").expect("nobody else came"), refused)
    })
}

#[test]
fn wrong_token_and_wrong_generation_are_refused() {
    let (here, there) = strangers([0; 32], 7);
    assert!(there.to_string().contains("rank 0 refused rank 1: wrong token"), "{there}");
    assert!(here.to_string().contains("for ranks [1]; 1 callers turned away, the last: wrong token"), "{here}");
    let (here, there) = strangers(TOKEN, 6);
    assert!(there.to_string().contains("wrong generation: the refusing rank is in 7"), "{there}");
    assert!(here.to_string().contains("for ranks [1]"), "{here}");
}

#[test]
fn who_calls_a_host_that_answers_nothing_hears_that_the_world_is_over() {
    // A port whose queue is full is as mute as a host that was cut off.
    let mute = std::net::TcpListener::bind((LOCALHOST, 0)).expect("bind");
    let addr = mute.local_addr().expect("an address");
    let brief = Duration::from_millis(200);
    let queue: Vec<TcpStream> =
        std::iter::from_fn(|| TcpStream::connect_timeout(&addr, brief).ok()).take(5_000).collect();
    assert!(queue.len() < 5_000, "its queue is never full");
    let (second, own) = TcpListenerHandle::bind(LOCALHOST).expect("bind");
    let began = Instant::now();
    let over = || (began.elapsed() > brief).then(|| "its host is gone".to_owned());
    let patient = FabricOptions { deadline_ms: 30_000, ..options() };
    let error = second.connect_unless(1, &[addr, own], &TOKEN, &patient, &over).err().expect("nobody answers");
    assert!(matches!(&error, FabricError::Aborted { reason } if reason == "its host is gone"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn noise_on_the_port_is_ignored() {
    let (first, addr_first) = TcpListenerHandle::bind(LOCALHOST).expect("bind");
    let (second, addr_second) = TcpListenerHandle::bind(LOCALHOST).expect("bind");
    let addrs: [SocketAddr; 2] = [addr_first, addr_second];
    std::thread::scope(|scope| {
        let first = scope.spawn(move || first.connect(0, &addrs, &TOKEN, &options()));
        // One shouts, one hangs up, one says nothing, one starts well and stops.
        let mut loud = TcpStream::connect(addr_first).expect("connect");
        let _ = loud.write_all(&[0xa5; 100_000]);
        drop(TcpStream::connect(addr_first).expect("connect"));
        let _mute = TcpStream::connect(addr_first).expect("connect");
        let mut half = TcpStream::connect(addr_first).expect("connect");
        half.write_all(b"lockhelo").expect("a start");
        std::thread::sleep(Duration::from_millis(30));
        let second = second.connect(1, &addrs, &TOKEN, &options()).expect("the right one comes in");
        let first = first.join().expect("no panic").expect("the right one was let in");
        second.send(&pair(), 0, &[3.0]).expect("send");
        let mut got = [0.0];
        first.recv(&pair(), 1, &mut got).expect("receive");
        assert_eq!(got, [3.0]);
        // The port is closed now, and who waited there was let go.
        assert!(TcpStream::connect(addr_first).is_err());
        half.set_read_timeout(Some(Duration::from_secs(2))).expect("a timeout");
        // It heard a greeting, and no more.
        let mut heard = Vec::new();
        let _ = half.read_to_end(&mut heard);
        assert_eq!((heard.len(), &heard[..8]), (56, &b"lockgrtg"[..]));
    });
}
