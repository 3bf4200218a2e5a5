//! The device that runs a case, and its memory: the emulator's, or a card's with the same sentinels around it.

#[cfg(feature = "cuda")]
pub(crate) use seat::Seat;
use zero_emulator::Emulator;
use zero_kernels::indices::Fault;
use zero_kernels::{Address, Dtype, Launch};

/// Runs the launches of a case.
pub(crate) enum Device {
    /// The emulator, with the threads of a block in one order.
    Emulated { emulator: &'static Emulator, order: u32 },
    /// A card. Memory that this thread creates during the case is on the card.
    #[cfg(feature = "cuda")]
    Card(std::rc::Rc<Seat>),
}

impl Device {
    /// Runs a launch to its end. The case holds the [`Memory`] at its addresses.
    pub(crate) fn run<A>(&self, launch: &Launch<A>) {
        match self {
            // SAFETY: every case creates the memory of its launches beforehand, in the sizes that the launch's
            // documentation requires.
            Self::Emulated { emulator, order } => unsafe { emulator.run(launch, *order) }.unwrap(),
            #[cfg(feature = "cuda")]
            Self::Card(seat) => seat.run(launch),
        }
    }
}

/// Memory that kernels may read and write. The surrounding sentinels are checked whenever the memory is read, and when
/// it is dropped.
pub(crate) struct Memory {
    host: zero_emulator::Memory,
    #[cfg(feature = "cuda")]
    on_card: Option<seat::Copied>,
}

impl Memory {
    /// Allocates `bytes` bytes with all bits set, which is NaN in every type.
    pub(crate) fn unwritten(bytes: usize) -> Self {
        Self::placed(zero_emulator::Memory::unwritten(bytes))
    }

    /// Allocates numbers, each rounded once to a type.
    pub(crate) fn floats(dtype: Dtype, values: &[f32]) -> Self {
        Self::placed(zero_emulator::Memory::floats(dtype, values))
    }

    /// Allocates u32 values.
    pub(crate) fn integers(values: &[u32]) -> Self {
        Self::placed(zero_emulator::Memory::integers(values))
    }

    fn placed(host: zero_emulator::Memory) -> Self {
        Self {
            #[cfg(feature = "cuda")]
            on_card: Seat::of_this_thread().map(|seat| seat::Copied::new(seat, &host)),
            host,
        }
    }

    /// The address of the first byte, a multiple of 16.
    pub(crate) fn address(&mut self) -> Address {
        #[cfg(feature = "cuda")]
        if let Some(copied) = &self.on_card {
            return copied.address();
        }
        self.host.address()
    }

    fn read<R>(&self, read: impl Fn(&zero_emulator::Memory) -> R) -> R {
        #[cfg(feature = "cuda")]
        if let Some(copied) = &self.on_card {
            return read(&copied.download(&self.host));
        }
        read(&self.host)
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.read(zero_emulator::Memory::bytes)
    }

    pub(crate) fn to_floats(&self, dtype: Dtype) -> Vec<f32> {
        self.read(|memory| memory.to_floats(dtype))
    }

    pub(crate) fn to_integers(&self) -> Vec<u64> {
        self.read(zero_emulator::Memory::to_integers)
    }

    pub(crate) fn to_fault(&self) -> Fault {
        self.read(zero_emulator::Memory::to_fault)
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
    use zero_emulator::SENTINELS;
    use zero_kernels::{Address, Launch};

    use crate::card::Card;

    /// A card and the stream of one case.
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

        /// Runs `case` on the card and returns its result.
        pub(crate) fn taken<R>(card: &'static Card, case: impl FnOnce(Rc<Self>) -> R) -> R {
            /// Clears the thread's seat, even if the case panics.
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

    /// A copy of host memory and its sentinels on the card.
    pub(crate) struct Copied {
        seat: Rc<Seat>,
        allocation: Allocation,
    }

    impl Copied {
        pub(crate) fn new(seat: Rc<Seat>, from: &zero_emulator::Memory) -> Self {
            Self { allocation: seat.card.upload(&from.whole(), &seat.stream), seat }
        }

        pub(crate) fn address(&self) -> Address {
            self.allocation.address() + SENTINELS as Address
        }

        /// Returns the current contents.
        pub(crate) fn download(&self, from: &zero_emulator::Memory) -> zero_emulator::Memory {
            let mut whole = vec![0; self.allocation.len()];
            self.allocation.copy_to(&mut whole, &self.seat.stream).unwrap();
            from.with_whole(&whole)
        }
    }
}
