//! Hosts on one machine: network namespaces on a bridge of their own. Nothing of the machine's own network is touched, and all is
//! gone when the net is dropped.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Namespaces of nets that died without cleaning up are found by this, and the number of their process.
const PREFIX: &str = "lsnet";

/// `hosts` namespaces that reach each other by TCP; the machine itself reaches none.
pub struct Net {
    name: String,
    subnet: u32,
    hosts: usize,
}

impl Net {
    /// Makes it.
    ///
    /// # Errors
    /// Why namespaces cannot be made here.
    pub fn new(hosts: usize) -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        sweep();
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}x{made}", std::process::id());
        let net = Self { name, subnet: std::process::id().wrapping_add(made) % 250 + 1, hosts };
        ip(&["netns", "add", &net.switch()])?;
        ip(&["-n", &net.switch(), "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", &net.switch(), "link", "set", "br0", "up"])?;
        for host in 0..hosts {
            let (space, port) = (net.space(host), port(host));
            ip(&["netns", "add", &space])?;
            ip(&[
                "link",
                "add",
                "eth0",
                "netns",
                &space,
                "type",
                "veth",
                "peer",
                "name",
                &port,
                "netns",
                &net.switch(),
            ])?;
            ip(&["-n", &net.switch(), "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &space, "addr", "add", &format!("{}/24", net.address(host)), "dev", "eth0"])?;
            ip(&["-n", &space, "link", "set", "eth0", "up"])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])?;
        }
        Ok(net)
    }

    fn switch(&self) -> String {
        format!("{}sw", self.name)
    }

    fn space(&self, host: usize) -> String {
        format!("{}h{host}", self.name)
    }

    /// Where `host` is.
    pub fn address(&self, host: usize) -> String {
        format!("10.77.{}.{}", self.subnet, host + 1)
    }

    /// `program` on `host`.
    pub fn command(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(host)]).arg(program).stdin(Stdio::null());
        command
    }

    /// Pulls the plug of `host`, or puts it in again.
    pub fn plug(&self, host: usize, in_: bool) {
        let state = if in_ { "up" } else { "down" };
        ip(&["-n", &self.switch(), "link", "set", &port(host), state]).expect("the port is there");
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        (0..self.hosts).map(|host| self.space(host)).chain([self.switch()]).for_each(|space| {
            let _ = ip(&["netns", "del", &space]);
        });
    }
}

fn port(host: usize) -> String {
    format!("p{host}")
}

fn ip(args: &[&str]) -> Result<(), String> {
    let out = Command::new("ip").args(args).stdin(Stdio::null()).output().map_err(|e| format!("ip: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim()))
}

/// Takes away what dead processes left.
fn sweep() {
    let Ok(out) = Command::new("ip").args(["netns", "list"]).output() else { return };
    for space in String::from_utf8_lossy(&out.stdout).lines().filter_map(|line| line.split(' ').next()) {
        let owner = space.strip_prefix(PREFIX).and_then(|rest| rest.split('x').next());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = ip(&["netns", "del", space]);
        }
    }
}
