//! Words that show the purpose of a sentence, in the languages of the search and in Chinese, Japanese and Korean.

use std::collections::HashSet;
use std::sync::LazyLock;
use unicode_segmentation::UnicodeSegmentation as _;

/// Words of standing instructions, decisions, preferences, duties and limits.
const DEMANDS: &str = "\
    always never must mustn cannot prefer prefers decided decision decide agreed deadline due allergic allergy remember \
    budget limit rule require required requires avoid instead policy promise promised confirmed vegetarian hate \
    immer nie niemals muss müssen darf bevorzuge lieber entschieden entscheidung beschlossen vereinbart frist allergisch allergie \
    merke vermeide statt stets \
    toujours jamais doit devons préfère préférons décidé décision convenu délai allergique allergie important retiens évite maximum \
    siempre nunca debe debemos prefiero decidido decisión acordado plazo alérgico alérgica alergia importante recuerda evita \
    sempre mai deve dobbiamo preferisco deciso decisione concordato scadenza allergico allergica importante ricorda evita \
    nunca deve prefiro decidido decisão combinado prazo alérgico alergia lembre evite \
    altijd nooit moet moeten liever besloten besluit afgesproken allergisch belangrijk onthoud vermijd \
    altid aldrig skal foretrækker besluttet aftalt vigtigt husk undgå \
    alltid aldri må foretrekker bestemt avtalt viktig unngå \
    aldrig måste föredrar beslutat bestämt överens viktigt undvik \
    aina koskaan täytyy pitää päätetty päätimme sovittu allerginen tärkeää muista vältä \
    mindig soha kell döntöttünk döntés megegyeztünk allergiás fontos kerüld \
    mereu niciodată trebuie prefer decis decizie convenit termen alergic evită \
    her asla gerekir gerekiyor tercih karar verdik alerjim önemli unutma kaçın \
    всегда никогда должен должна должны надо предпочитаю решили решение договорились срок аллергия важно запомни избегай \
    πάντα ποτέ πρέπει προτιμώ αποφασίσαμε απόφαση προθεσμία αλλεργία σημαντικό θυμήσου \
    دائما دائمًا أبدا أبدًا يجب أفضل قررنا قرار اتفقنا حساسية مهم تذكر";

/// Words by which a sentence corrects an earlier one.
const CORRECTIONS: &str = "\
    actually instead changed change moved correction corrected updated longer wrong sorry rather switched renamed postponed \
    replaced \
    doch stattdessen geändert korrektur verschoben falsch sondern umbenannt \
    finalement plutôt changé correction reporté maintenant remplacé \
    ahora cambiado cambió mejor corrección aplazado invece cambiato spostato corretto adesso agora mudou corrigido adiado \
    toch gewijzigd verplaatst nu ændret flyttet endret ændrat ändrat flyttat muutettu siirretty módosult mégis schimbat acum \
    değişti artık aslında теперь изменили перенесли исправление вместо τελικά αλλάξαμε τώρα الآن تغير بدلا";

/// The same for scripts without spaces between words.
const DEMANDS_CJK: &str = "\
    必须 务必 永远 从不 不要 不能 决定 总是 过敏 截止 重要 记住 只用 偏好 喜欢 最多 至少 必須 永遠 \
    決定 絶対 必ず いつも 常に 決して しないで アレルギー 締め切り 締切 好み 覚えて してください ことにし 반드시 항상 절대 결정 알레르기";
const CORRECTIONS_CJK: &str = "\
    改为 改成 改到 更正 其实 现在 不再 换成 推迟 やっぱり 変更 訂正 ではなく 代わりに 延期 대신";

/// Returns `true` if a sentence decides, demands or forbids something, or states a preference.
pub(super) fn demands(sentence: &str) -> bool {
    static WORDS: LazyLock<HashSet<&str>> = LazyLock::new(|| DEMANDS.split_whitespace().collect());
    contains(sentence, &WORDS, DEMANDS_CJK)
}

/// Returns `true` if a sentence corrects something.
pub(super) fn corrects(sentence: &str) -> bool {
    static WORDS: LazyLock<HashSet<&str>> = LazyLock::new(|| CORRECTIONS.split_whitespace().collect());
    contains(sentence, &WORDS, CORRECTIONS_CJK)
}

fn contains(sentence: &str, words: &HashSet<&str>, parts: &str) -> bool {
    sentence.unicode_words().any(|word| words.contains(word.to_lowercase().as_str()))
        || (!sentence.is_ascii() && parts.split_whitespace().any(|part| sentence.contains(part)))
}
