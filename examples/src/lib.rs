//! Small programs against the library
