//! Whose a folder of compiled kernels is. A GPU runs what lies there with the rights of the process.

use std::path::Path;

use crate::Error;

/// Checks that nobody but this user and the system's administrator can put files into `folder`; a folder that
/// does not exist yet is fine. A group's right to write counts unless the group is the owner's own, as the
/// file modes of many Linux systems give it.
///
/// # Errors
/// [`Error::UntrustedCache`].
#[cfg(unix)]
pub(crate) fn check_trust(folder: &Path) -> Result<(), Error> {
    use std::os::unix::fs::MetadataExt;
    let Ok(facts) = std::fs::metadata(folder) else { return Ok(()) };
    // The owner of a process's folder is its effective user. Where there is none, modes alone are looked at.
    let user = std::fs::metadata("/proc/self").map_or(facts.uid(), |own| own.uid());
    let owner = Owner { user: facts.uid(), group: facts.gid(), mode: facts.mode() };
    match owner.objection(user) {
        None => Ok(()),
        Some((reason, advice)) => {
            let advice = advice.replace("FOLDER", &folder.display().to_string());
            Err(Error::UntrustedCache { path: folder.to_owned(), reason, advice })
        }
    }
}

/// Owners and modes are not asked for.
#[cfg(not(unix))]
pub(crate) fn check_trust(_: &Path) -> Result<(), Error> {
    Ok(())
}

/// A folder's owner, group and mode.
#[cfg(unix)]
struct Owner {
    user: u32,
    group: u32,
    mode: u32,
}

#[cfg(unix)]
impl Owner {
    /// Why `user` should not run what lies there, and what would work.
    fn objection(&self, user: u32) -> Option<(String, String)> {
        let Owner { user: owner, group, mode } = *self;
        let own_group = group == owner;
        let writers = match (mode & 0o002 != 0, mode & 0o020 != 0 && !own_group) {
            (true, _) => Some("every user"),
            (false, true) => Some("its group"),
            (false, false) => None,
        };
        if owner != user && owner != 0 {
            let reason = format!("it belongs to user {owner}, and this is user {user}");
            return Some((reason, "set FA_CACHE_DIR to a folder of your own".to_owned()));
        }
        let writers = writers?;
        let advice = "remove it, or `chmod go-w FOLDER` if nobody has written to it, or set FA_CACHE_DIR to \
                      a folder that only you can write to";
        Some((format!("{writers} may write to it (mode {:03o})", mode & 0o777), advice.to_owned()))
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_others_can_fill_is_refused() {
        // Owner, group, mode, and what is said to user 1000.
        let cases = [
            (1000, 1000, 0o700, None),
            (1000, 1000, 0o755, None),
            (1000, 1000, 0o775, None),
            (1000, 50, 0o755, None),
            (1000, 50, 0o775, Some("its group may write to it (mode 775)")),
            (1000, 1000, 0o777, Some("every user may write to it (mode 777)")),
            (1000, 1000, 0o1777, Some("every user may write to it (mode 777)")),
            (0, 0, 0o755, None),
            (0, 0, 0o775, None),
            (0, 50, 0o775, Some("its group may write to it (mode 775)")),
            (0, 0, 0o1777, Some("every user may write to it (mode 777)")),
            (1001, 1001, 0o700, Some("it belongs to user 1001, and this is user 1000")),
        ];
        for (user, group, mode, said) in cases {
            let found = Owner { user, group, mode }.objection(1000);
            assert_eq!(found.as_ref().map(|(reason, _)| reason.as_str()), said, "{user} {group} {mode:o}");
        }
        // root uses nobody else's either.
        assert!(Owner { user: 1000, group: 1000, mode: 0o755 }.objection(0).is_some());
    }
}
