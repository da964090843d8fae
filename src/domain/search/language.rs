//! The languages whose stemming rules the analyzer knows, and their detection.

use frostem::Algorithm;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whatlang::{Detector, Lang};

/// Largest size of a sample. Detection takes some 0.1 ms for it.
pub(super) const MAX_DETECTED_BYTES: usize = 600;
/// Shorter texts are often taken for another language.
const MIN_DETECTED_CHARS: usize = 40;
/// Languages without stemming rules that the detector confuses with languages that have them.
const UNLIKELY: [Lang; 4] = [Lang::Afr, Lang::Cat, Lang::Epo, Lang::Lat];

/// Defines [`Language`], with the names in settings, the two-letter codes of ISO 639-1, and the names of the detector.
macro_rules! languages {
    ($($language:ident $name:literal $code:literal $detected:ident,)*) => {
        /// The language whose stemming rules apply.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, ToSchema)]
        #[serde(rename_all = "lowercase")]
        pub enum Language {
            /// That of each session, which is detected from its messages; English until then.
            #[default]
            Auto,
            /// No stemming: a query finds only the exact form of a word.
            None,
            $($language,)*
        }

        impl Language {
            /// The codes of all languages with stemming rules.
            pub const CODES: &[&str] = &[$($code),*];
            const DETECTED: &[(Lang, Self)] = &[$((Lang::$detected, Self::$language)),*];

            /// Returns the code and the stemming rules.
            pub(super) fn rules(self) -> Option<(&'static str, Algorithm)> {
                match self {
                    Self::None => None,
                    Self::Auto => Self::English.rules(),
                    $(Self::$language => Some(($code, Algorithm::$language)),)*
                }
            }
        }

        named_variants!(Language { Auto = "auto", None = "none", $($language = $name),* });
    };
}

languages! {
    Arabic "arabic" "ar" Ara,
    Danish "danish" "da" Dan,
    Dutch "dutch" "nl" Nld,
    English "english" "en" Eng,
    Finnish "finnish" "fi" Fin,
    French "french" "fr" Fra,
    German "german" "de" Deu,
    Greek "greek" "el" Ell,
    Hungarian "hungarian" "hu" Hun,
    Italian "italian" "it" Ita,
    Norwegian "norwegian" "no" Nob,
    Portuguese "portuguese" "pt" Por,
    Romanian "romanian" "ro" Ron,
    Russian "russian" "ru" Rus,
    Spanish "spanish" "es" Spa,
    Swedish "swedish" "sv" Swe,
    Turkish "turkish" "tr" Tur,
}

impl Language {
    /// Returns the language of a text; `None` if that is uncertain, or if there are no stemming rules for it.
    #[must_use]
    pub fn detect(text: &str) -> Option<Self> {
        text.char_indices().nth(MIN_DETECTED_CHARS)?;
        let found =
            Detector::with_denylist(UNLIKELY.to_vec()).detect(text).filter(whatlang::Info::is_reliable)?;
        Self::DETECTED.iter().find(|(lang, _)| *lang == found.lang()).map(|(_, language)| *language)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn language_of_a_sentence_is_detected_and_that_of_a_few_words_is_not() {
        for (text, language) in [
            (
                "Wir haben im Keller zwei Wärmepumpen eingebaut, weil die Heizung kaputt war.",
                Some(Language::German),
            ),
            ("Nous avons loué deux vélos électriques pour traverser la Camargue.", Some(Language::French)),
            ("We have rented two bicycles, because the bus did not come on Sunday.", Some(Language::English)),
            ("Мы купили билеты на поезд, потому что самолёт был слишком дорогим.", Some(Language::Russian)),
            (
                "我们租了两辆自行车，因为星期天没有公共汽车，所以我们骑车去了海边，一路上风景很好，大家都很开心。",
                None,
            ),
            ("Wärmepumpen? Gern.", None),
            ("select_in_load(Order.items), joinedload(Order.id) 2026-04-17 0x7f3a", None),
        ] {
            assert_eq!(Language::detect(text), language, "{text}");
        }
    }
}
