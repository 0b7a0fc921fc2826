//! Experts (model.md section 7): a router, the picked experts, and one shared expert for every row.

use deepinfer_kernels::{Backend, ExpertParams, RouteParams, RowFormat};

use super::forward::Pass;
use super::weights::LayerWeights;
use crate::exchange::ExchangeError;

impl<B: Backend> Pass<'_, B> {
    /// `y = sum_e weight_e expert_e(x) + shared(x)`. `image` flags image rows (empty: none); `arrivals`
    /// counts picks by local expert slot. Fails only in a step with an exchange.
    pub fn experts(
        &mut self,
        layer: &LayerWeights<B>,
        image: &[u8],
        arrivals: &mut [u32],
    ) -> Result<(), ExchangeError> {
        let shape = &self.constants.shape;
        let moe = &layer.moe;
        let (rows, hidden) = (self.rows, shape.hidden_size);
        let params = self.expert_params(layer);
        let ws = &mut *self.ws;
        let route = RouteParams {
            top_k: moe.top_k,
            normalize: shape.norm_topk_prob,
            scale: shape.routed_scaling_factor,
        };
        self.backend.route(
            &ws.x.plain,
            rows,
            &moe.gate,
            &moe.bias,
            &moe.bias_image,
            image,
            route,
            &mut ws.route_ids,
            &mut ws.route_weights,
        );
        if self.spread.is_some() && !shape.is_draft(layer.number) {
            self.spread_experts(layer, params, arrivals)?;
        } else {
            let (ids, weights) = (&ws.route_ids, &ws.route_weights);
            self.backend.experts(&ws.x.plain, rows, ids, weights, &moe.experts, params, &mut ws.y, arrivals);
            self.shared_expert(layer);
            let ws = &mut *self.ws;
            self.backend.add(&mut ws.y, &ws.shared_out, rows * hidden);
        }
        self.record_experts(layer.number, moe.top_k);
        Ok(())
    }

    /// How the picked experts of a layer are computed.
    pub fn expert_params(&self, layer: &LayerWeights<B>) -> ExpertParams {
        let moe = &layer.moe;
        ExpertParams {
            top_k: moe.top_k,
            limit: self.constants.shape.swiglu_limit,
            quantize: moe.experts.slots.first().is_some_and(|e| self.rounds(&e.w1)),
        }
    }

    /// `shared_out = w2 swiglu(w1 x, w3 x)`.
    pub fn shared_expert(&mut self, layer: &LayerWeights<B>) {
        let shape = &self.constants.shape;
        let shared = &layer.moe.shared;
        let (rows, hidden, inner) = (self.rows, shape.hidden_size, shape.moe_intermediate_size);
        let rounds = [&shared.w1, &shared.w3, &shared.w2].map(|w| self.rounds(w));
        let ws = &mut *self.ws;
        if rounds[0] || rounds[1] {
            ws.x.round(self.backend, hidden, &ws.identity[..rows]);
        }
        self.backend.matmul(&shared.w1, ws.x.form(rounds[0]), rows, &mut ws.shared_gate);
        self.backend.matmul(&shared.w3, ws.x.form(rounds[1]), rows, &mut ws.shared_up);
        self.backend.swiglu(&mut ws.shared_gate, &ws.shared_up, rows * inner, shape.swiglu_limit);
        if rounds[2] {
            self.backend.fake_quantize(&mut ws.shared_gate, rows, inner, RowFormat::Fp8);
        }
        self.backend.matmul(&shared.w2, &ws.shared_gate, rows, &mut ws.shared_out);
    }

    fn record_experts(&mut self, layer: usize, top_k: usize) {
        let Some(probe) = self.probe.as_deref_mut() else {
            return;
        };
        let (rows, ws) = (self.rows, &*self.ws);
        let mut ids = vec![0; rows * top_k];
        self.backend.read(&ws.route_ids, 0, &mut ids);
        let name = |what: &str| format!("layers.{layer}.{what}");
        probe.whole(name("route_ids"), &[rows, top_k], ids);
        probe.floats(self.backend, name("route_weights"), &[rows, top_k], &ws.route_weights);
        let size = [rows, self.constants.shape.hidden_size];
        probe.floats(self.backend, name("ffn_out"), &size, &ws.y);
    }
}
