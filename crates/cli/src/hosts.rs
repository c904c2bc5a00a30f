//! `lockstep controller` and `lockstep agent`: a run on several hosts.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::remote::client::{self, Agent, Ended};
use control::remote::handshake::{Key, TOKEN_MIN};
use control::remote::host_name;
use events::Event;
use train::TrainError;
use train::launch::Hosts;

use crate::{cores, show, train_cmd};

/// A year.
const TIME_MAX_S: u64 = spec::TIME_MAX_MS / 1000;

#[derive(clap::Args)]
pub struct ControllerArgs {
    #[command(flatten)]
    train: train_cmd::Args,
    /// Where agents call: an address or a name of this host, and a port; port 0: a free one. Another than loopback needs a token.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7070", value_parser = here)]
    listen: SocketAddr,
    /// The secret that agents must know, at least 16 characters. It is never sent; the link is authenticated, not encrypted.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Agents to wait for before ranks are started.
    #[arg(long, value_name = "N", default_value_t = 1)]
    hosts: usize,
    /// Wait while another controller of this run is at work, and take over when it is dead; agents call both (`--controller A,B`).
    #[arg(long)]
    standby: bool,
}

#[derive(clap::Args)]
pub struct AgentArgs {
    /// Where the controller is; with several they are called in turn.
    #[arg(long, value_name = "ADDR:PORT", required = true, value_delimiter = ',', value_parser = callable)]
    controller: Vec<String>,
    /// The controller's secret.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Name of this host: letters, digits, `.`, `-`, `_` [default: the system's]
    #[arg(long)]
    host: Option<String>,
    /// Most rank processes here [default: one a core]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Where ranks of other hosts reach those of this one, an address or a name [default: the address that this host has towards
    /// the controller]
    #[arg(long, value_name = "ADDR", value_parser = address)]
    address: Option<IpAddr>,
    /// Ranks that come to no step while no controller can be reached are ended after so many seconds, at least 1.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=TIME_MAX_S))]
    idle_limit_s: u64,
    /// With no rank here, this agent ends (exit code 5) when no controller has answered for so many seconds; 0: it calls for ever.
    #[arg(long, value_name = "S", default_value_t = 3_600, value_parser = clap::value_parser!(u64).range(..=TIME_MAX_S))]
    call_limit_s: u64,
}

pub fn controller(args: &ControllerArgs) -> Result<u8, TrainError> {
    if args.train.run_dir.is_none() {
        return Err(TrainError::BadInput(
            "--run-dir is missing: name the run's folder, at the same path on all hosts, so that a controller that is started again finds it".into(),
        ));
    }
    let token = token(args.token_file.as_deref())?;
    let hosts = Hosts { listen: args.listen, token, count: args.hosts, standby: args.standby };
    match train_cmd::go(&args.train, Some(hosts)) {
        Err(TrainError::Over(text)) => {
            args.train.show().event(&Event::Notice { text });
            Ok(0)
        }
        Err(stopped @ TrainError::Stopped(_)) => {
            let (text, code) = (stopped.to_string(), stopped.exit_code() as u8);
            if args.train.json {
                args.train.show().event(&Event::Notice { text });
            } else {
                aside(&text);
            }
            Ok(code)
        }
        ended => ended,
    }
}

pub fn agent(args: &AgentArgs) -> Result<u8, TrainError> {
    let host = match &args.host {
        Some(host) => host.clone(),
        None => std::fs::read_to_string("/proc/sys/kernel/hostname")
            .map_err(|e| TrainError::BadInput(format!("this host has no name ({e}); give --host")))?
            .trim()
            .to_owned(),
    };
    host_name(&host).map_err(TrainError::BadInput)?;
    let slots = args.ranks.unwrap_or_else(cores);
    if slots == 0 {
        return Err(TrainError::BadInput("--ranks 0: this host would run none; give 1 or more".into()));
    }
    let agent = Agent {
        controllers: args.controller.clone(),
        key: Key::new(&token(args.token_file.as_deref())?),
        host: host.clone(),
        slots,
        address: args.address,
        program: train_cmd::own_binary()?,
        idle: Duration::from_secs(args.idle_limit_s),
        patience: (args.call_limit_s > 0).then(|| Duration::from_secs(args.call_limit_s)),
        stop: train_cmd::stop_flag()?,
    };
    let say = |text: &str| show::line(&format!("agent {host}: {text}"));
    say(&format!("{slots} places, calls {}", args.controller.join(", ")));
    let ended = client::run(&agent, &say).map_err(|e| TrainError::Internal(format!("the agent cannot run: {e}")))?;
    match ended {
        Ended::Run { code, reason } => {
            say(&format!("the run is over ({reason}, exit code {code})"));
            Ok(code.clamp(0, 255) as u8)
        }
        Ended::Stopped => {
            say("asked to stop; its ranks end");
            Ok(0)
        }
        Ended::Alone(seconds, last) => {
            say(&format!(
                "no controller at {} for {seconds} s, and no rank is left here: this agent ends; start it again when there is one, or wait longer \
                 (--call-limit-s, 0: for ever) ({last})",
                args.controller.join(", ")
            ));
            // As a run whose budget of failures is spent.
            Ok(5)
        }
        Ended::Refused(reason) => Err(TrainError::BadInput(reason)),
    }
}

/// A line beside what goes to standard output, which may be for a program. That nobody listens changes nothing.
fn aside(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A name or address with a port. Whether it is known is asked with each call: a name may come later.
fn callable(text: &str) -> Result<String, String> {
    let port =
        text.rsplit_once(':').filter(|(host, _)| !host.is_empty()).and_then(|(_, port)| port.parse::<u16>().ok());
    match port {
        Some(1..) => Ok(text.into()),
        _ => Err("give the controller's address and port, such as 10.0.0.1:7070".into()),
    }
}

/// An address of this host, by number or by name, with a port.
fn here(text: &str) -> Result<SocketAddr, String> {
    let form = "give an address or name of this host with a port, such as 10.0.0.1:7070, [::1]:7070 or localhost:7070";
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let (name, port) = text.rsplit_once(':').filter(|(name, _)| !name.is_empty()).ok_or(form)?;
    let port = port.parse().map_err(|_| form)?;
    named(name).map(|address| SocketAddr::new(address, port)).map_err(|e| format!("{e}; {form}"))
}

/// An address of this host, by number or by name.
fn address(text: &str) -> Result<IpAddr, String> {
    text.parse().or_else(|_| named(text)).map_err(|e| format!("{e}; give one such as 10.0.0.1"))
}

/// Of the addresses that a name has, one that this host has; of the older protocol if there is one, which is what other hosts
/// most often find behind a name.
fn named(name: &str) -> Result<IpAddr, String> {
    let found = (name, 0).to_socket_addrs().map_err(|e| format!("the name {name} is not known ({e})"))?;
    let mut found: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    found.sort_by_key(IpAddr::is_ipv6);
    let mine = |address: &&IpAddr| TcpListener::bind((**address, 0)).is_ok();
    found.iter().find(mine).copied().ok_or_else(|| {
        let found: Vec<_> = found.iter().map(ToString::to_string).collect();
        format!("the name {name} is of {}, which this host does not have", found.join(", "))
    })
}

/// The secret of a file, without white space around it; empty: none is used.
fn token(path: Option<&Path>) -> Result<Vec<u8>, TrainError> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let text = std::fs::read(path).map_err(|e| {
        let path = path.display();
        TrainError::BadInput(format!(
            "--token-file {path}: {e}; make one with `head -c 32 /dev/urandom | base64 > {path}; chmod 600 {path}`"
        ))
    })?;
    let mode = std::fs::metadata(path).map_or(0, |file| file.permissions().mode());
    if mode & 0o077 != 0 {
        let path = path.display();
        aside(&format!(
            "notice: --token-file {path} can be read or written by others (mode {:o}); `chmod 600 {path}` keeps the secret one",
            mode & 0o777
        ));
    }
    let token = text.trim_ascii().to_vec();
    if token.len() < TOKEN_MIN {
        return Err(TrainError::BadInput(format!(
            "--token-file {}: {} characters could be guessed; write at least {TOKEN_MIN} random ones",
            path.display(),
            token.len()
        )));
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_is_given_by_number_or_by_name() {
        assert_eq!(here("10.0.0.1:7070").unwrap().to_string(), "10.0.0.1:7070");
        assert_eq!(here("[::1]:0").unwrap().to_string(), "[::1]:0");
        assert_eq!(here("localhost:7070").unwrap().to_string(), "127.0.0.1:7070");
        assert_eq!(address("localhost").unwrap().to_string(), "127.0.0.1");
        for wrong in ["", ":7070", "localhost", "localhost:", "localhost:70700", "10.0.0.1", "::1"] {
            assert!(here(wrong).unwrap_err().contains("localhost:7070"), "{wrong:?}");
        }
        assert!(here("no-such-name.invalid:7070").unwrap_err().contains("is not known"));
    }
}
