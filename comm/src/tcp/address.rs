//! Determines which of this host's addresses to listen on.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Returns the address to listen on for an interface, given as an address or by name. If a named interface has several
/// addresses, returns an IPv4 address if there is one. `None` is loopback.
///
/// # Errors
/// Fails if no interface has that name; the message lists the interfaces of this host.
pub fn bind_address(interface: Option<&str>) -> Result<IpAddr, String> {
    let Some(interface) = interface else { return Ok(Ipv4Addr::LOCALHOST.into()) };
    if let Ok(address) = interface.parse() {
        return Ok(address);
    }
    let all = addresses().map_err(|error| format!("cannot list the network interfaces: {error}"))?;
    let mut found: Vec<IpAddr> =
        all.iter().filter(|(name, _)| name == interface).map(|(_, address)| *address).collect();
    // IPv4 comes first: the IPv6 address of an interface is often link-local, and such an address is unusable without
    // its scope.
    found.sort_by_key(|address| address.is_ipv6());
    found.first().copied().ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        format!("no network interface {interface} has an address; this host has {}", names.join(", "))
    })
}

/// Returns the names and addresses of all interfaces.
fn addresses() -> std::io::Result<Vec<(String, IpAddr)>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the result.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: `next` is an element of the list, which lives until `freeifaddrs`.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: the address is not null and, by the contract of `getifaddrs`, as long as its family requires; it is
        // read unaligned.
        let address: IpAddr = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: as above.
                let socket = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                Ipv4Addr::from(u32::from_be(socket.sin_addr.s_addr)).into()
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let socket = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                Ipv6Addr::from(socket.sin6_addr.s6_addr).into()
            }
            _ => continue,
        };
        // SAFETY: the name is a C string that lives until `freeifaddrs`.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        found.push((name.to_string_lossy().into_owned(), address));
    }
    // SAFETY: `list` came from `getifaddrs` and is freed once.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_found_by_name_and_by_address() {
        assert_eq!(bind_address(None), Ok(IpAddr::from(Ipv4Addr::LOCALHOST)));
        assert_eq!(bind_address(Some("lo")), Ok(IpAddr::from(Ipv4Addr::LOCALHOST)));
        assert_eq!(bind_address(Some("10.1.2.3")), Ok(IpAddr::from([10, 1, 2, 3])));
        let error = bind_address(Some("nowhere0")).expect_err("no such interface");
        assert!(error.contains("nowhere0") && error.contains("lo"), "{error}");
    }
}
