//! Sends and receives: which of them has no other half.

use super::differ::payload;
use super::table::Table;
use super::view::{Exchange, RankView, State};
use super::{Doubt, What, Why};

/// What an open send or receive of a rank lacks.
pub(super) enum Lack {
    /// The peer has not come to its half.
    Peer(u32, Why),
    /// Both halves are there, and one gives more or less than the other one takes.
    Size(Box<Doubt>),
}

/// What `exchange`, an open send or receive of `view`, waits for; none: nothing that the records tell.
pub(super) fn lack(table: &Table, view: &RankView, at: usize) -> Option<Lack> {
    let exchange = &view.exchanges[at];
    let peer = exchange.peer?;
    let Some(other) = table.views.get(&peer) else { return Some(Lack::Peer(peer, Why::NoAnswer)) };
    if !view.strict || !other.strict {
        // Ours tell by themselves whom they wait for, and their sends never wait.
        return (view.waits_for == Some(peer)).then_some(Lack::Peer(peer, Why::NoPartner));
    }
    let group = table.group_of(view.rank, exchange);
    let half = |of: &RankView, e: &Exchange, sends: bool, peer: u32| {
        e.point_to_point && e.sends == sends && e.peer == Some(peer) && table.group_of(of.rank, e) == group
    };
    let mine = view.exchanges[..at].iter().filter(|e| half(view, e, exchange.sends, peer));
    let mut theirs = other.exchanges.iter().filter(|e| half(other, e, !exchange.sends, view.rank));
    // Where both records reach back to the beginning the n-th send belongs to the n-th receive. Else those that are over are
    // taken to belong to each other, for a half alone does not end.
    let partner = match view.whole && other.whole {
        true => theirs.nth(mine.count()),
        false => theirs.filter(|e| e.open()).nth(mine.filter(|e| e.open()).count()),
    };
    let Some(partner) = partner else { return Some(Lack::Peer(peer, Why::NoPartner)) };
    let (gives, takes) = (payload(exchange), payload(partner));
    if gives.is_some() && takes.is_some() && gives != takes {
        return Some(Lack::Size(Box::new(sizes(table, view, exchange, other, partner))));
    }
    match partner.open() {
        true if exchange.state == State::Started && other.queued(partner) => Some(Lack::Peer(peer, Why::Queued)),
        true => Some(Lack::Peer(peer, Why::Behind)),
        false => None,
    }
}

fn sizes(table: &Table, view: &RankView, exchange: &Exchange, other: &RankView, partner: &Exchange) -> Doubt {
    let group = table.group_of(view.rank, exchange).map(|group| &table.groups[group]);
    let does = |e: &Exchange| {
        let elements = payload(e).unwrap_or(0);
        format!("{} {elements} elements", if e.sends { "sends" } else { "receives" })
    };
    let mut sides = vec![(does(exchange), vec![view.rank]), (does(partner), vec![other.rank])];
    let mut ranks = vec![view.rank, other.rank];
    ranks.sort_unstable();
    sides.sort_by_key(|(_, ranks)| ranks[0]);
    Doubt {
        what: What::Sizes,
        ranks,
        group: exchange.group.clone(),
        desc: group.map_or_else(String::new, |g| g.desc.clone()),
        operation: exchange.operation.clone(),
        sequence: exchange.sequence,
        size: exchange.size(),
        sides,
        lacks: Vec::new(),
        waiting: Vec::new(),
    }
}
