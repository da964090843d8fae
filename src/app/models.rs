//! Builds the models and pools from the settings.

use crate::config::{self, ProviderKind, Settings};
use crate::llm::call_memory::CallMemoryLimit;
use crate::llm::http::anthropic::Anthropic;
use crate::llm::http::openai::OpenAi;
use crate::llm::http::{HttpProvider, WireFormat, build_http_client};
use crate::llm::model::ModelSpec;
use crate::llm::pool::ModelPools;
use crate::llm::prompt::Prompts;
use crate::llm::provider::{Extractive, Provider};
use std::sync::Arc;
use std::time::Duration;

/// Returns all pools. The error lists all problems with their paths in the settings.
pub(super) fn pools(settings: &Settings) -> Result<ModelPools, String> {
    let prompts = Prompts::new(&settings.consolidation.prompts).map_err(|errors| errors.join("; "))?;
    let limits = &settings.limits;
    let memory = CallMemoryLimit::new(limits.max_model_bytes_in_flight, limits.max_key_share);
    Ok(ModelPools::new(models(settings)?, &settings.llm.pools, prompts, memory))
}

/// Returns all models, including those that no pool uses.
pub(super) fn models(settings: &Settings) -> Result<Vec<ModelSpec>, String> {
    let (mut models, mut errors) = (Vec::new(), Vec::new());
    for (name, model) in &settings.llm.models {
        let Some(provider) = settings.llm.providers.get(&model.provider) else {
            errors.push(format!("llm.models.{name}.provider: unknown provider \"{}\"", model.provider));
            continue;
        };
        match self::provider(provider, model.connect_timeout) {
            Ok(provider) => {
                models.push(ModelSpec { name: name.clone(), provider, settings: model.clone() });
            }
            Err(error) => errors.push(format!("llm.providers.{}.{error}", model.provider)),
        }
    }
    if errors.is_empty() { Ok(models) } else { Err(errors.join("; ")) }
}

/// Returns the provider. A new kind of provider is added here.
fn provider(settings: &config::Provider, connect_timeout: Duration) -> Result<Arc<dyn Provider>, String> {
    match settings.kind {
        ProviderKind::Extractive => Ok(Arc::new(Extractive)),
        ProviderKind::OpenAi => http_provider(OpenAi::new(settings), settings, connect_timeout),
        ProviderKind::Anthropic => http_provider(Anthropic, settings, connect_timeout),
    }
}

fn http_provider(
    wire_format: impl WireFormat,
    settings: &config::Provider,
    connect_timeout: Duration,
) -> Result<Arc<dyn Provider>, String> {
    let client = build_http_client(connect_timeout).map_err(|error| error.to_string())?;
    let provider = HttpProvider::new(client, wire_format, settings)?;
    Ok(Arc::new(provider))
}
