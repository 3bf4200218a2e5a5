//! Explains why a launcher still waits for another launcher.

use super::{Line, locked};

impl Line {
    /// Returns what this launcher knows about why a host is missing, to be appended to a message.
    pub(super) fn reason(&self, missing: usize) -> String {
        if let Some(trouble) = &*locked(&self.shared.trouble) {
            return format!(": cannot reach the launcher of host 0: {trouble}");
        }
        let is_seen = locked(&self.shared.others)[missing].is_some();
        match (&self.server, missing) {
            (Some(server), _) if !is_seen => format!(": its launcher has not joined this job at {}", server.address()),
            // Host 0 publishes its state under the name of its job as soon as its store runs.
            (None, 0) if !is_seen => {
                ": the store at the address of host 0 belongs to another job; give all hosts the same --rdzv-id".into()
            }
            _ if is_seen => {
                format!(": it is connected to another launcher with the --node-rank of this host, {}", self.hosts.index)
            }
            _ => String::new(),
        }
    }
}
