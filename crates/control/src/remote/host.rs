//! What the controller's side knows of a host.

use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpStream};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::dial::CALL;
use super::window::{Inbox, Outbox};
use super::{Order, ToAgent};

/// An agent whose link was closed calls again at once; one that does not is gone.
const CLOSED: Duration = Duration::from_millis(1_000);

/// An agent that is calling a controller that does not answer calls the next one after this time at the latest.
const FIRST: Duration = CALL.saturating_add(Duration::from_secs(1));

/// A link to an agent.
pub(super) struct Link {
    /// Ascends with every link.
    pub number: u64,
    /// Only to end it.
    pub stream: TcpStream,
    /// To the thread that writes.
    pub words: SyncSender<ToAgent>,
}

impl Link {
    /// Says it; a link that takes nothing is ended, and what matters is said again on the next one.
    pub fn say(&self, word: ToAgent) {
        if self.words.try_send(word).is_err() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

/// A host.
pub(super) struct Host {
    /// Which life of its agent.
    pub session: u64,
    /// Where its ranks listen.
    pub address: IpAddr,
    /// News that came.
    pub news: Inbox,
    /// News that are written down.
    pub written: u64,
    /// Orders that were not yet carried out.
    pub orders: Outbox<Order>,
    /// The link, if there is one.
    pub link: Option<Link>,
    /// The last sign of life.
    heard_at: Instant,
    /// When the last link was closed, if it was.
    pub closed_at: Option<Instant>,
    /// The controller was told that it is gone.
    pub lost: bool,
    /// It is expected to call: an earlier controller knew it, or this side was cut off.
    awaited: bool,
}

impl Host {
    /// Of an agent in this life, of whom everything up to `seq` is known; no link yet.
    pub fn new(session: u64, seq: u64) -> Self {
        Self {
            session,
            address: Ipv4Addr::UNSPECIFIED.into(),
            news: Inbox::new(seq),
            written: seq,
            orders: Outbox::new(usize::MAX),
            link: None,
            heard_at: Instant::now(),
            closed_at: None,
            lost: false,
            awaited: true,
        }
    }

    /// It calls, and has this link from now on.
    pub fn calls(&mut self, link: Link) {
        self.unlink();
        (self.link, self.lost, self.closed_at) = (Some(link), false, None);
        self.heard();
    }

    /// It gave a sign of life.
    pub fn heard(&mut self) {
        (self.heard_at, self.awaited) = (Instant::now(), false);
    }

    /// From now on it has time to call.
    pub fn wait(&mut self) {
        (self.heard_at, self.awaited) = (Instant::now(), true);
    }

    /// Its silence says nothing yet.
    pub fn is_awaited(&self) -> bool {
        self.awaited && !self.lost
    }

    /// Why it is taken for gone, with everything on it; `silence`: the limit.
    pub fn gone(&self, silence: Duration) -> Option<String> {
        let silent = self.heard_at.elapsed();
        if silent > if self.awaited { silence.max(FIRST) } else { silence } {
            return Some(format!("no sign of life from its agent for {} ms", silent.as_millis()));
        }
        let closed = self.closed_at?.elapsed();
        (closed > if self.awaited { FIRST } else { CLOSED.min(silence) })
            .then(|| format!("its agent's link was closed {} ms ago and it did not call again", closed.as_millis()))
    }

    /// It has a link on which nothing comes.
    pub fn is_silent(&self, limit: Duration) -> bool {
        self.closed_at.is_none() && self.heard_at.elapsed() > limit
    }

    /// The link is over.
    pub fn unlink(&mut self) {
        if let Some(link) = self.link.take() {
            let _ = link.stream.shutdown(Shutdown::Both);
            self.closed_at = Some(Instant::now());
        }
    }
}
