//! Accepts the connections of a listener and passes each to its own thread, which authenticates the peer. The number of
//! unauthenticated connections at a time is limited.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::auth::PENDING;

/// Listens until it is dropped.
pub(crate) struct Doorkeeper {
    pub(crate) address: SocketAddr,
    listener: Arc<TcpListener>,
    closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Holds one of the slots for unauthenticated connections; drop it once the peer is authenticated.
pub(crate) struct Pending(Arc<AtomicUsize>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Doorkeeper {
    /// Passes each connection to `serve` on a new thread.
    pub(crate) fn start(
        listener: TcpListener,
        name: &str,
        serve: impl Fn(TcpStream, Pending) + Send + Sync + 'static,
    ) -> std::io::Result<Doorkeeper> {
        let address = listener.local_addr()?;
        let (listener, closing) = (Arc::new(listener), Arc::new(AtomicBool::new(false)));
        let (door, closed, serve) = (Arc::clone(&listener), Arc::clone(&closing), Arc::new(serve));
        let work = move || {
            let strangers = Arc::new(AtomicUsize::new(0));
            while !closed.load(Ordering::SeqCst) {
                match door.accept() {
                    Ok((stream, _)) => admit(stream, &strangers, &serve),
                    // The process may be out of file descriptors. Retry: a connection that ends frees its descriptor.
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("zero-comm {name}")).spawn(work)?;
        Ok(Doorkeeper { address, listener, closing, thread: Some(thread) })
    }
}

fn admit<S>(stream: TcpStream, strangers: &Arc<AtomicUsize>, serve: &Arc<S>)
where
    S: Fn(TcpStream, Pending) + Send + Sync + 'static,
{
    let pending = Pending(Arc::clone(strangers));
    if strangers.fetch_add(1, Ordering::SeqCst) >= PENDING {
        // Too many connections are unauthenticated. A legitimate peer tries again later.
        let _ = stream.shutdown(Shutdown::Both);
        return;
    }
    let serve = Arc::clone(serve);
    // If the thread cannot be spawned, the closure is dropped, and the connection with it.
    let _ = std::thread::Builder::new().name("zero-comm guest".into()).spawn(move || serve(stream, pending));
}

impl Drop for Doorkeeper {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::SeqCst);
        // Wakes the thread from `accept`.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
