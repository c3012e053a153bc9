-- Who decides next on an adaptive job's cap of rollouts in flight, and what was decided: one at a time, whichever worker asks first.
-- ARGV: 'claim', every_s; or 'decide', claim, cap, state.
-- Reply: ok {claim, state}: the caller decides now; early: another one did not long ago. ok: decided; lost: it took too long.
if not read_job() then return reply('missing') end
if ARGV[1] == 'claim' then
  local now = seconds()
  if now - tonumber(call('HGET', JOB, 'steered_at') or 0) < tonumber(ARGV[2]) then return reply('early') end
  local claim = string.format('%.6f', now)
  call('HSET', JOB, 'steered_at', claim)
  return reply('ok', { claim = claim, state = call('HGET', JOB, 'steering') or '' })
end
if call('HGET', JOB, 'steered_at') ~= ARGV[2] then return reply('lost') end
call('HSET', JOB, 'in_flight_cap', ARGV[3], 'steering', ARGV[4])
return reply('ok')
