//! Where a case runs, and its memory there: the emulator's, or a card's with the same sentinels around it.

#[cfg(feature = "cuda")]
pub(crate) use seat::Seat;
use zero_kernels::emulated::{self, Emulator};
use zero_kernels::indices::Fault;
use zero_kernels::{Address, Dtype, Launch};

/// What runs the launches of a case.
pub(crate) enum Device {
    /// The emulator, with the threads of a block in one order.
    Emulated { emulator: &'static Emulator, order: u32 },
    /// A card. Memory that this thread makes while there is one is the card's.
    #[cfg(feature = "cuda")]
    Card(std::rc::Rc<Seat>),
}

impl Device {
    /// Runs a launch to its end. The case holds the [`Memory`] at its addresses.
    pub(crate) fn run<A>(&self, launch: &Launch<A>) {
        match self {
            // SAFETY: every case makes the memory of its launches in front of them, in the sizes that the launch's documentation says.
            Self::Emulated { emulator, order } => unsafe { emulator.run(launch, *order) }.unwrap(),
            #[cfg(feature = "cuda")]
            Self::Card(seat) => seat.run(launch),
        }
    }
}

/// Memory that kernels may read and write. What lies around it is looked at whenever it is read, and at its end.
pub(crate) struct Memory {
    host: emulated::Memory,
    #[cfg(feature = "cuda")]
    on_card: Option<seat::Copied>,
}

impl Memory {
    /// `bytes` bytes with all bits set: numbers of every type are NaN.
    pub(crate) fn unwritten(bytes: usize) -> Self {
        Self::placed(emulated::Memory::unwritten(bytes))
    }

    /// Numbers in a type, each rounded once.
    pub(crate) fn floats(dtype: Dtype, values: &[f32]) -> Self {
        Self::placed(emulated::Memory::floats(dtype, values))
    }

    /// Whole numbers.
    pub(crate) fn integers(values: &[u32]) -> Self {
        Self::placed(emulated::Memory::integers(values))
    }

    fn placed(host: emulated::Memory) -> Self {
        Self {
            #[cfg(feature = "cuda")]
            on_card: Seat::of_this_thread().map(|seat| seat::Copied::new(seat, &host)),
            host,
        }
    }

    /// Where it begins, a multiple of 16.
    pub(crate) fn address(&mut self) -> Address {
        #[cfg(feature = "cuda")]
        if let Some(copied) = &self.on_card {
            return copied.address();
        }
        self.host.address()
    }

    fn read<R>(&self, read: impl Fn(&emulated::Memory) -> R) -> R {
        #[cfg(feature = "cuda")]
        if let Some(copied) = &self.on_card {
            return read(&copied.download(&self.host));
        }
        read(&self.host)
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.read(emulated::Memory::bytes)
    }

    pub(crate) fn to_floats(&self, dtype: Dtype) -> Vec<f32> {
        self.read(|memory| memory.to_floats(dtype))
    }

    pub(crate) fn to_integers(&self) -> Vec<u64> {
        self.read(emulated::Memory::to_integers)
    }

    pub(crate) fn to_fault(&self) -> Fault {
        self.read(emulated::Memory::to_fault)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.bytes();
        }
    }
}

#[cfg(feature = "cuda")]
mod seat {
    use std::cell::RefCell;
    use std::rc::Rc;

    use zero_cuda::{Allocation, Stream};
    use zero_kernels::emulated::{self, SENTINELS};
    use zero_kernels::{Address, Launch};

    use crate::card::Card;

    /// A card, and a stream for one case.
    pub(crate) struct Seat {
        card: &'static Card,
        stream: Stream,
    }

    thread_local! {
        static SEAT: RefCell<Option<Rc<Seat>>> = const { RefCell::new(None) };
    }

    impl Seat {
        pub(crate) fn of_this_thread() -> Option<Rc<Self>> {
            SEAT.with_borrow(Clone::clone)
        }

        /// What `case` gives on the card.
        pub(crate) fn taken<R>(card: &'static Card, case: impl FnOnce(Rc<Self>) -> R) -> R {
            /// Gets up, whatever became of the case.
            struct Leave;
            impl Drop for Leave {
                fn drop(&mut self) {
                    SEAT.set(None);
                }
            }
            let seat = Rc::new(Self { card, stream: Stream::new(&card.device).unwrap() });
            SEAT.set(Some(Rc::clone(&seat)));
            let _leave = Leave;
            case(seat)
        }

        pub(crate) fn run<A>(&self, launch: &Launch<A>) {
            let launched = self.card.launch(launch, &self.stream).and_then(|()| self.stream.synchronize());
            launched.unwrap_or_else(|error| panic!("{}: {error}", launch.entry));
        }
    }

    /// Memory of the card that holds what memory of the host held, and the sentinels of that.
    pub(crate) struct Copied {
        seat: Rc<Seat>,
        allocation: Allocation,
    }

    impl Copied {
        pub(crate) fn new(seat: Rc<Seat>, from: &emulated::Memory) -> Self {
            Self { allocation: seat.card.upload(&from.whole(), &seat.stream), seat }
        }

        pub(crate) fn address(&self) -> Address {
            self.allocation.address() + SENTINELS as Address
        }

        /// As it is now.
        pub(crate) fn download(&self, from: &emulated::Memory) -> emulated::Memory {
            let mut whole = vec![0; self.allocation.len()];
            self.allocation.copy_to(&mut whole, &self.seat.stream).unwrap();
            from.with_whole(&whole)
        }
    }
}
