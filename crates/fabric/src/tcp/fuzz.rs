//! What comes in at the door and over a stream is hostile: it is refused, with the field that is wrong, or ends at a deadline.
//! Nothing panics, and nothing is taken for a message that was not sent as one.

use super::handshake::{Claim, GREETING_BYTES, HELLO_BYTES, Hello, REPLY_BYTES, Verdict, greeted};
use super::*;
use crate::frame::{HEADER_BYTES, Header, Tail};
use crate::options::Group;
use proptest::prelude::*;
use twox_hash::XxHash3_64;

const TOKEN: [u8; 32] = [7; 32];
const GENERATION: u32 = 5;

fn options() -> FabricOptions {
    FabricOptions { generation: GENERATION, deadline_ms: 250, message_bytes_max: 1 << 20, ..FabricOptions::default() }
}

fn header() -> Header {
    let (operation, lane, group, sequence) = (1, 0, 9, 0);
    let (source, target, bytes) = (1, 0, 12);
    Header { operation, lane, generation: GENERATION, group, sequence, source, target, bytes, checksum: true }
}

fn message(header: &Header, payload: &[u8]) -> Vec<u8> {
    let tail = Tail::new(header, XxHash3_64::oneshot(payload));
    [&header.encode()[..], payload, tail.bytes()].concat()
}

/// What rank 0 makes of `bytes` after a caller has been let in as rank 1, and has hung up behind them.
fn received(bytes: &[u8]) -> Result<Vec<u8>, FabricError> {
    let (listener, addr) = TcpListenerHandle::bind(IpAddr::from([127, 0, 0, 1])).expect("bind");
    std::thread::scope(|scope| {
        let end = scope.spawn(move || listener.connect(0, &[addr, addr], &TOKEN, &options()).expect("rank 1 comes"));
        let mut stream = TcpStream::connect(addr).expect("connect");
        let mut greeting = [0; GREETING_BYTES];
        stream.read_exact(&mut greeting).expect("a greeting");
        let nonce = greeted(&greeting).expect("a greeting");
        let claim = Claim { generation: GENERATION, source: 1, target: 0, world: 2 };
        let hello = claim.hello(&TOKEN, &nonce, [3; 32]);
        stream.write_all(&hello.encode()).expect("hello");
        let mut reply = [0; REPLY_BYTES];
        stream.read_exact(&mut reply).expect("a reply");
        assert_eq!(Verdict::decode(&reply, &TOKEN, &nonce, &hello), Verdict::Welcome);
        let end = end.join().expect("no panic");
        // The receiver may hang up in the middle of it.
        let _ = stream.write_all(bytes);
        drop(stream);
        end.recv_bytes(&Group::new(9, "pair", vec![0, 1]), 1)
    })
}

#[test]
fn the_message_itself_comes_through() {
    assert_eq!(received(&message(&header(), b"twelve bytes")).unwrap(), b"twelve bytes");
}

/// Each field wrong for itself, under right checksums.
#[test]
fn a_wrong_field_is_named() {
    let good = header();
    let wrong = [
        ("generation", Header { generation: GENERATION - 1, ..good }),
        ("source", Header { source: 0, ..good }),
        ("target", Header { target: 1, ..good }),
        ("sequence", Header { sequence: 1, ..good }),
        ("operation", Header { operation: 7, ..good }),
    ];
    for (field, header) in wrong {
        match received(&message(&header, b"twelve bytes")) {
            Err(FabricError::Mismatch { what, rank: 1, .. }) => assert_eq!(what, field),
            other => panic!("{field}: {other:?}"),
        }
    }
    for bytes in [(1 << 20) + 1, u64::MAX] {
        let oversized = Header { bytes, ..good };
        let ended = received(&oversized.encode());
        assert!(matches!(&ended, Err(FabricError::Oversize { rank: 1, direction: "from", .. })), "{ended:?}");
    }
    let mut bad = message(&good, b"twelve bytes");
    bad[HEADER_BYTES] ^= 1;
    let ended = received(&bad);
    assert!(matches!(&ended, Err(FabricError::Mismatch { what: "payload checksum", .. })), "{ended:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn noise_is_no_message(noise in proptest::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(received(&noise).is_err());
    }

    #[test]
    fn a_damaged_message_is_no_message(at in 0usize..128, bit in 0u8..8, cut in 0usize..=128) {
        let whole = message(&header(), b"twelve bytes");
        prop_assert_eq!(whole.len(), 128);
        let mut bytes = whole[..cut].to_vec();
        if at < cut {
            bytes[at] ^= 1 << bit;
        }
        let got = received(&bytes);
        // Bits behind the checksum are fill: nobody reads them.
        let fill = HEADER_BYTES + 12 + 8;
        let whole = cut == 128 && at >= fill;
        prop_assert_eq!(got.is_ok(), whole, "{:?}", got);
    }
}

proptest! {
    #[test]
    fn only_what_was_encoded_is_read(raw in proptest::collection::vec(any::<u8>(), HEADER_BYTES)) {
        let raw: [u8; HEADER_BYTES] = raw.try_into().expect("64 bytes");
        prop_assert!(Header::decode(&raw).is_err());
    }

    #[test]
    fn a_header_under_right_checksums_never_panics(mut raw in proptest::collection::vec(any::<u8>(), HEADER_BYTES)) {
        let magic = header().encode();
        raw[..6].copy_from_slice(&magic[..6]);
        let sum = XxHash3_64::oneshot(&raw[..56]);
        raw[56..].copy_from_slice(&sum.to_le_bytes());
        let raw: [u8; HEADER_BYTES] = raw.try_into().expect("64 bytes");
        let read = Header::decode(&raw).expect("its checksum is right");
        let longest = crate::frame::TAIL_BYTES_MAX;
        let tail = Tail::len(&Header { bytes: read.bytes >> 8, ..read });
        prop_assert!(tail <= longest, "{tail}");
    }

    #[test]
    fn noise_at_the_door_is_noise(
        greeting in proptest::collection::vec(any::<u8>(), GREETING_BYTES),
        hello in proptest::collection::vec(any::<u8>(), HELLO_BYTES),
        reply in proptest::collection::vec(any::<u8>(), REPLY_BYTES),
    ) {
        prop_assert_eq!(greeted(&greeting.try_into().expect("its length")), None);
        let mine = Claim { generation: 3, source: 1, target: 0, world: 4 }.hello(&TOKEN, &[1; 32], [2; 32]);
        prop_assert_eq!(Hello::decode(&hello.try_into().expect("its length")), None);
        prop_assert_eq!(Verdict::decode(&reply.try_into().expect("its length"), &TOKEN, &[1; 32], &mine), Verdict::Noise);
    }

    #[test]
    fn who_differs_in_anything_stays_outside(
        generation in 0u32..4, source in 0u32..5, target in 0u32..5, world in 0u32..6, flip in 0usize..256, free: bool,
    ) {
        let here = Claim { generation: 3, source: 1, target: 1, world: 4 };
        let mut token = TOKEN;
        if flip < 32 {
            token[flip] ^= 1;
        }
        let caller = Claim { generation, source, target, world }.hello(&token, &[1; 32], [2; 32]);
        let welcome = flip >= 32 && generation == 3 && world == 4 && target == 1 && source > 1 && free;
        prop_assert_eq!(here.judge(&TOKEN, &[1; 32], &caller, free) == Verdict::Welcome, welcome);
    }
}
