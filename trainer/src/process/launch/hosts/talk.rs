//! The thread through which the launchers of several hosts exchange their states.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use zero_comm::store::{StoreClient, StoreError};

use super::{GATHERING, LauncherState, Seen, Shared, TICK, locked};

/// The thread that publishes the state of this launcher and reads the states of the others.
pub(super) struct Talk {
    pub(super) place: String,
    pub(super) token: String,
    pub(super) keys: String,
    pub(super) index: usize,
    pub(super) patience: Duration,
    pub(super) shared: Arc<Shared>,
}

impl Talk {
    pub(super) fn run(&self) {
        // At first, the launcher of host 0 may not be running yet.
        let mut end = Instant::now() + GATHERING;
        let mut client = None;
        while !self.shared.closing.load(Ordering::Relaxed) {
            match self.exchange(&mut client) {
                Ok(()) => {
                    end = Instant::now() + self.patience;
                    *locked(&self.shared.trouble) = None;
                }
                Err(error) if matches!(error, StoreError::Unauthorized { .. }) || Instant::now() > end => {
                    let hint = match error {
                        StoreError::Unauthorized { .. } => {
                            "; the file named by ZERO_TRAIN_TOKEN_FILE must have the same content on all hosts"
                        }
                        _ => "",
                    };
                    *locked(&self.shared.lost) = Some(format!("cannot reach the launcher of host 0: {error}{hint}"));
                    return;
                }
                // A connection that failed in the middle of a message is unusable.
                Err(error) => {
                    client = None;
                    *locked(&self.shared.trouble) = Some(error.to_string());
                }
            }
            std::thread::sleep(TICK);
        }
    }

    fn exchange(&self, client: &mut Option<StoreClient>) -> Result<(), StoreError> {
        let client = match client {
            Some(client) => client,
            None => client.insert(StoreClient::connect(&self.place, Some(&self.token), Instant::now() + TICK)?),
        };
        let state = {
            let mut own = locked(&self.shared.own);
            own.beat += 1;
            own.clone()
        };
        // Serialization of plain data cannot fail.
        client.set(&format!("{}/{}", self.keys, self.index), &serde_json::to_vec(&state).unwrap_or_default())?;
        let count = locked(&self.shared.others).len();
        for host in (0..count).filter(|&host| host != self.index) {
            let text = match client.get(&format!("{}/{host}", self.keys), Instant::now()) {
                Ok(text) => text,
                Err(StoreError::Missing { .. }) => continue,
                Err(error) => return Err(error),
            };
            let Ok(state) = serde_json::from_slice::<LauncherState>(&text) else { continue };
            let met = std::mem::replace(&mut locked(&self.shared.own).met[host], state.id);
            if self.shared.gathered.load(Ordering::Relaxed) && met != state.id {
                locked(&self.shared.own).met[host] = met;
                *locked(&self.shared.lost) = Some(format!("the launcher of host {host} was restarted"));
                continue;
            }
            let seen = &mut locked(&self.shared.others)[host];
            if seen.as_ref().is_none_or(|seen| seen.state != state) {
                *seen = Some(Seen { state, changed: Instant::now() });
            }
        }
        Ok(())
    }
}
