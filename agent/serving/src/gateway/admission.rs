//! Who is taken in. Every request gets an answer at once: a place in the bounded queue, or a refusal that says
//! which limit and when to come back.

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::message::Refusal;
use deepinfer_protocol::{Span, Time};

use super::EndedEarly;
use super::options::{GatewayOptions, TenantLimits};
use super::stats::{Gauges, Tally};

/// What is known of sizes that never fit, from refusals of leaders.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    /// The shortest sequence that was refused as too large.
    pub refused: Option<u32>,
}

/// What an admission is decided on.
pub(super) struct Question<'a> {
    pub options: &'a GatewayOptions,
    pub gauges: &'a Gauges,
    pub held: usize,
    pub fleet: Option<&'a FleetView>,
    pub shutdown: Option<Time>,
    pub sizes: Sizes,
    /// How long requests have waited for a worker lately.
    pub queue_wait: Span,
}

impl Question<'_> {
    /// Limits of a tenant.
    pub(super) fn limits(&self, tenant: &str) -> TenantLimits {
        self.options.tenants.get(tenant).copied().unwrap_or(self.options.tenant_default)
    }

    /// The answer to a request of this tenant and length.
    pub(super) fn decide(&self, tenant: &str, tokens: u64) -> Result<(), EndedEarly> {
        self.pools()?;
        if let Some(refused) = self.sizes.refused.filter(|r| tokens >= u64::from(*r)) {
            let detail = format!(
                "the prompt has {tokens} tokens and no pool has the memory for {refused}: shorten the prompt"
            );
            return Err(EndedEarly::TooLarge { detail });
        }
        let tally = self.gauges.tenants.get(tenant).copied().unwrap_or_default();
        let Tally { waiting, .. } = tally;
        let queued = self.limits(tenant).queued;
        let full = if self.held >= self.options.max_held {
            Some(format!("{} requests are held, the limit of this gateway", self.held))
        } else if self.gauges.fresh >= self.options.max_waiting {
            Some(format!("{} requests wait, the limit of this gateway", self.gauges.fresh))
        } else if self.gauges.fresh_tokens + tokens > self.options.max_waiting_tokens {
            let most = self.options.max_waiting_tokens;
            Some(format!("{} prompt tokens wait, at most {most} may", self.gauges.fresh_tokens))
        } else if waiting >= queued {
            Some(format!("{waiting} requests of your tenant wait, the limit is {queued}"))
        } else {
            None
        };
        match full {
            Some(detail) => Err(overloaded(Refusal::QueueFull, detail, self.queue_wait)),
            None => Ok(()),
        }
    }

    /// Whether there is anything that could ever serve it (SV-083, SV-116).
    fn pools(&self) -> Result<(), EndedEarly> {
        let unavailable =
            |detail: String| Err(EndedEarly::Unavailable { detail, retry_after: Span::secs(2) });
        if self.shutdown.is_some() {
            return unavailable("the gateway is shutting down".to_owned());
        }
        let Some(fleet) = self.fleet else {
            return unavailable("the gateway does not know the fleet yet".to_owned());
        };
        if fleet.closed {
            return unavailable("the cluster takes no more requests".to_owned());
        }
        let of = |role: Role| fleet.members.iter().filter(move |m| m.role == role);
        for (role, name) in [(Role::Prefill, "prefill"), (Role::Decode, "decode")] {
            // A pool that is rebuilt is worth waiting for, as long as the request may wait.
            if of(role).next().is_none() && !fleet.rebuilding.contains(&role) {
                return unavailable(format!("there is no {name} pool"));
            }
        }
        let (Some(prefill), Some(decode)) = (of(Role::Prefill).next(), of(Role::Decode).next()) else {
            return Ok(());
        };
        // Who starts does not say yet, and who is rebuilt may come with another one.
        let fits = |p: &str, d: &str| p == d || p.is_empty() || d.is_empty();
        let paired = of(Role::Prefill).any(|p| of(Role::Decode).any(|d| fits(&p.kv_epoch, &d.kv_epoch)));
        if !paired && fleet.rebuilding.is_empty() {
            return unavailable(format!(
                "prefill ({}, kv-epoch {:?}) and decode ({}, kv-epoch {:?}) cannot read each other's KV",
                prefill.name, prefill.kv_epoch, decode.name, decode.kv_epoch
            ));
        }
        Ok(())
    }
}

/// A refusal that says when to come back: at least a second, at most a minute.
pub(super) fn overloaded(reason: Refusal, detail: String, wait: Span) -> EndedEarly {
    EndedEarly::Overloaded { reason, detail, retry_after: wait.clamp(Span::secs(1), Span::secs(60)) }
}
