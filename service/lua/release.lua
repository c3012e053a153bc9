-- Hands a lease back: first in line, its journal kept. ARGV: rollout id, fence. Reply: ok; lost (nothing to hand back).
if not read_job() then return reply('missing') end
if call('HGET', FENCES, ARGV[1]) ~= ARGV[2] then return reply('lost') end
requeue_rollout(ARGV[1], load(ROLLOUTS, ARGV[1]), seconds())
return reply('ok')
