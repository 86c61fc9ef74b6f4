//! Changes to ringdisk's configuration.

use crate::setting::Setting;
use crate::target::{Edits, Target};
use crate::text::Edit;

/// The edits for a setting.
///
/// # Errors
/// The reason why the setting cannot be made.
pub fn edits(target: &Target<'_>, setting: Setting) -> Edits {
    let disk = target.disk()?;
    match setting {
        Setting::Cache(mode) => {
            let pair = format!("cache = \"{mode}\"");
            Ok(vec![match disk.table.given("disk.cache") {
                Some(span) => Edit::replace(span, pair),
                None => Edit::replace(disk.span.after(), format!("\n{pair}")),
            }])
        }
        _ => Err("ringdisk has no such setting".into()),
    }
}
